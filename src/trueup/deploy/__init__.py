"""Segment a folder of images with an adapting model: `segment_folder(SegmentConfig(model), images, out)`."""

from trueup.deploy.segment_folder import SegmentConfig, SegmentSummary, segment_folder

__all__ = ["SegmentConfig", "SegmentSummary", "segment_folder"]
