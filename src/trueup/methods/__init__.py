"""The methods, one file each; importing one registers it."""

from trueup.methods import source, bn, tent, pl, shot_im, t3a, eta, eata, lame, tsd, pixel_tsd  # noqa: F401, I001  (in the paper's order)
