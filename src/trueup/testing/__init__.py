"""For those who test methods: the contract that every method must pass, and tiny trained models to run it on."""

from trueup.testing.case import Case, SkipCheck, kinds
from trueup.testing.checks import CHECKS, check_method
from trueup.testing.toys import convnet, images, patchnet, scenes, segnet

__all__ = ["CHECKS", "Case", "SkipCheck", "check_method", "convnet", "images", "kinds", "patchnet", "scenes", "segnet"]
