"""All that a method's file needs of the flow and the model: base classes, its description, and types of hooks."""

from trueup.core.method import GradientMethod, Info, Method, Named, fusable
from trueup.core.registry import register
from trueup.model.params import Params
from trueup.model.split_model import Output, SplitModel

__all__ = ["GradientMethod", "Info", "Method", "Named", "Output", "Params", "SplitModel", "fusable", "register"]
