"""Masks for a folder of images, by a segmenter that adapts as it goes: `segment(Setup(model), images, out)`."""

from trueup.deploy.segment_folder import Setup, Summary, segment

__all__ = ["Setup", "Summary", "segment"]
