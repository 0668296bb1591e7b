"""For those who test methods: the contract that every method must pass, and tiny trained models to run it on."""

from trueup.testing.case import Case, SkipCheck
from trueup.testing.checks import CHECKS, check_method
from trueup.testing.toys import convnet, images, patchnet

__all__ = ["CHECKS", "Case", "SkipCheck", "check_method", "convnet", "images", "patchnet"]
