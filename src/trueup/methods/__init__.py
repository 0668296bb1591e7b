"""The methods; importing their files registers them."""

from trueup.methods import source, bn, tent, pl, shot_im, t3a, eta, eata, lame, tsd, pixel_tsd  # noqa: F401, I001  (in the paper's order)
from trueup.methods import head_only, bn_mixed, rdumb, shot, tent_prebn, sar, deyo, roid  # noqa: F401
from trueup.methods import memo, note, rotta, cotta, tast, tast_bn, adacontrast  # noqa: F401
