"""Plant known bugs of this field one by one and name the test that finds each; a survivor is a missing test.

Run: make mutants, or python tests/mutants.py [words of a mutant's name]
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent

# A bug of the benchmark is for the benchmark's tests to find, and the other way round.
BENCHMARK = ("data", "source", "bench", "report")
CORE = [str(path) for path in sorted((ROOT / "tests").iterdir()) if path.name not in BENCHMARK and path.name != "cli"]
CORE = [path for path in CORE if path.endswith(("core", "methods")) or Path(path).name.startswith("test_")]

# What goes wrong; file; what stands there; what the bug makes of it.
MUTANTS = [
    (
        "statistics: flag set, source statistics used all the same",
        "core/statistics.py",
        "            layer.running_mean = layer.running_var = None  # so",
        "            layer.track_running_stats = False  # so",
    ),
    (
        "statistics: training mode, so that buffers drift",
        "core/statistics.py",
        "layer.running_mean = layer.running_var = None  #",
        "layer.train()  #",
    ),
    ("statistics: a second pass moves the estimates", "core/statistics.py", '(name == "ema" and not update)', "False"),
    (
        "statistics: not finite, and kept",
        "core/statistics.py",
        "if not all_finite(u for _, u in pairs if u is not None):",
        "if False:",
    ),
    ("statistics: unbiased variance", "core/statistics.py", "correction=0", "correction=1"),
    (
        "model: adapted in place",
        "core/copying.py",
        "return copy.deepcopy(model, dict(kept_tensors(model)))",
        "return model",
    ),
    ("model: its input changed in place", "core/heads.py", "arguments(x.clone())", "arguments(x)"),
    (
        "model: activations recomputed with other statistics",
        "core/adapter.py",
        "not twice), net.normalizing(len(x)):",
        "not twice):",
    ),
    (
        "model: losses under the user's autocast",
        "core/adapter.py",
        "enabled=False)\n        with exact(), torch.no_grad():\n            method.observe",
        "enabled=True)\n        with exact(), torch.no_grad():\n            method.observe",
    ),
    ("model: dropout left on", "core/split.py", "self.train().eval()", "self.train()"),
    (
        "model: train() reaches it",
        "core/adapter.py",
        "        return self\n\n    def _apply",
        "        return super().train(mode)\n\n    def _apply",
    ),
    ("parameters: all are updated", "core/params.py", "if wanted(name)}", "}"),
    (
        "parameters: BatchNorm only",
        "core/params.py",
        "(_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)",
        "(_NormBase,)",
    ),
    ("parameters: frozen ones are left out", "core/params.py", "if p.is_floating_point()}", "if p.requires_grad}"),
    (
        "head: hook left after an exception",
        "core/compiled.py",
        "    try:\n        yield calls\n    finally:\n        handle.remove()",
        "    yield calls\n    handle.remove()",
    ),
    ("head: any layer of the right width", "core/heads.py", " and becomes(out, logits, output)", ""),
    ("teacher: an alias of the student", "core/split.py", "twin = copy.deepcopy(self)", "twin = copy.copy(self)"),
    (
        "flow: predicts after the update",
        "core/adapter.py",
        "method.predict(net, first, self.state)",
        "method.predict(net, method.forward(net, x, self.state), self.state)",
    ),
    (
        "flow: fails under inference_mode",
        "core/adapter.py",
        "with torch.inference_mode(False):\n            x = self._entered",
        "with torch.no_grad():\n            x = self._entered",
    ),
    ("flow: NaN pixels are taken", "core/inputs.py", "if not bool(usable(x)):", "if False:"),
    (
        "flow: steps along a gradient that is not finite",
        "core/adapter.py",
        "if not bool(size.isfinite()):",
        "if False:",
    ),
    ("flow: episodic is ignored", "core/adapter.py", "again, learns = self.method.episodic,", "again, learns = False,"),
    (
        "flow: steps is ignored",
        "core/adapter.py",
        "self.method.steps if isinstance(self.method, GradientMethod) else 1",
        "1",
    ),
    (
        "random: the user's stream moves on",
        "core/randomness.py",
        "zip(devices, theirs, strict=True):\n                _set(d, state)",
        "zip(devices, theirs, strict=True):\n                pass",
    ),
    (
        "reset: the memory stays",
        "core/adapter.py",
        "self.state = copy.deepcopy(state or self._fresh[0])",
        "self.state = self.state if len(list(self.state.buffers())) else copy.deepcopy(state or self._fresh[0])",
    ),
    (
        "reset: the optimiser stays",
        "core/adapter.py",
        "self._optimizer = self.method.optimizer(named) if named else None",
        "self._optimizer = self._optimizer or (self.method.optimizer(named) if named else None)",
    ),
    ("reset: the weights stay", "core/adapter.py", "put(self.net.model, name, tensor, self._source[name])", "pass"),
    (
        "load: part of the memory is lost",
        "core/snapshot.py",
        '_assign(adapter.state, parts["state"])',
        '_assign(adapter.state, {n: t for n, t in parts["state"].items() if n != "arrival"})',
    ),
    (
        "load: the optimiser is lost",
        "core/snapshot.py",
        '        _assign_optimizer(adapter, parts["optimizer"]',
        "        _assign_optimizer(adapter, {}",
    ),
    ("load: another model's state is taken", "core/snapshot.py", '    "source": "another source model",\n', ""),
    ("load: an altered file is taken", "core/files.py", ".hexdigest().encode() != digest:", ".hexdigest() == 0:"),
    ("save: not atomic", "atomic.py", "with open(partial,", "with open(path,"),
    (
        "save: others may read images and features",
        "atomic.py",
        "opener=_owner_only if private else None",
        "opener=None",
    ),
    (
        "losses: softmax over the batch",
        "losses.py",
        "log_s = F.log_softmax(logits, dim=1)",
        "log_s = F.log_softmax(logits, dim=0)",
    ),
    (
        "losses: L1 for L2",
        "losses.py",
        "F.normalize(a, p=2, dim=1, eps=1e-12)",
        "F.normalize(a, p=1, dim=1, eps=1e-12)",
    ),
    (
        "losses: divergence with its arguments swapped",
        "losses.py",
        "(log_p.exp() * (log_p - log_q))",
        "(log_q.exp() * (log_q - log_p))",
    ),
    (
        "bank: grows without bound",
        "memory.py",
        "if self.per_class is None:\n            rows",
        "if True:\n            rows",
    ),
    ("bank: keeps the least certain", "memory.py", "entropy.to(self.entropy.dtype)", "-entropy.to(self.entropy.dtype)"),
    (
        "bank: a newcomer wins a tie",
        "memory.py",
        "entropy.unsqueeze(1), right=True)",
        "entropy.unsqueeze(1), right=False)",
    ),
    (
        "bank: what leaves stays in the sums",
        "memory.py",
        "        self._count(change.freed, -1, change.leaves)\n",
        "        self.counts.index_add_(0, self.labels[change.freed], -torch.ones_like(change.freed))\n",
    ),
    (
        "bank: the oldest neighbour wins a tie",
        "search.py",
        "edge - slack, arrival, -1)",
        "edge - slack, 2**40 - arrival, -1)",
    ),
    ("bank: similarities without norms", "search.py", ".mul_(scale[start:stop])", ""),
    ("bank: a tolerance for cosines alone", "search.py", "eps * lengths", "eps * torch.ones_like(lengths)"),
    (
        "sketch: candidates are not compared",
        "search.py",
        "similarity = _compared(shelf, queries, rows)",
        "similarity = best[0]",
    ),
    (
        "sketch: of raw features",
        "memory.py",
        'self._sketched(feature * values["scale"].unsqueeze(1))',
        "self._sketched(feature)",
    ),
    ("sketch: not around a centre", "memory.py", "self.centre = total / self.counts.sum()", "pass"),
    ("sketch: the part along the centre is lost", "search.py", "asked[:, -1] = 1", "asked[:, -1] = 0"),
    (
        "sketch: another projection each time",
        "search.py",
        "generator=torch.Generator().manual_seed(0)",
        "generator=None",
    ),
    ("sketch: asked for and not used", "methods/tsd.py", 'sketch=self.search == "sketch" and', "sketch=False and"),
    (
        "move: the memory is rounded",
        "core/copying.py",
        "return new if wide == new.dtype else t.to(new.device)",
        "return new.to(wide)",
    ),
    ("model: autocast keeps old weights", "core/adapter.py", "torch.clear_autocast_cache()  #", "pass  #"),
    ("bank: rounding of a giant stays", "memory.py", "        self._refresh(change.classes, change.left)\n", ""),
    (
        "head: one that sees maps",
        "core/heads.py",
        "return features.shape == (len(logits), weight.shape[1]) and scores.shape == logits.shape",
        "return True",
    ),
    ("head: groups", "core/heads.py", 'if getattr(layer, "groups", 1) > 1:', "if False:"),
    (
        "head: bias of a convolution lost",
        "core/readout.py",
        "F.linear(features.to(weight.dtype), weight, bias)",
        "F.linear(features.to(weight.dtype), weight)",
    ),
    ("pixels: rare classes drown", "methods/pixel_tsd.py", "        if self.balanced:\n", "        if False:\n"),
    ("pixels: no consistency filter", "methods/pixel_tsd.py", "if self.consistency:", "if False:"),
    (
        "pixels: entries forget what they stand for",
        "ring.py",
        "count / count.clamp(max=samples)",
        "torch.ones_like(count)",
    ),
    (
        "pixels: weights of neighbours not brought to mean 1",
        "methods/pixel_tsd.py",
        "        weight /= weight.mean(dim=1, keepdim=True)\n",
        "",
    ),
    (
        "pixels: neighbours' similarity learns",
        "methods/pixel_tsd.py",
        "state.neighbors(z.detach()[image",
        "state.neighbors(1.1 * z.detach()[image * 0",
    ),
    ("pixels: targets learn", "methods/pixel_tsd.py", "s.detach(), _labels(out), state)", "s, _labels(out), state)"),
    (
        "pixels: the same pixels every time",
        "ring.py",
        "torch.rand(label.shape, device=label.device)",
        "torch.ones_like(label, dtype=torch.float32)",
    ),
    ("pixels: no entropy filter", "methods/pixel_tsd.py", '0.5 if self.per_class == "half" else 1.0', "1.0"),
    ("ring: the oldest stay", "ring.py", "argsort(descending=True)", "argsort()"),
    ("ring: the half of highest entropy", "ring.py", "rank < wanted", "rank >= wanted"),
    (
        "ring: features of any length",
        "ring.py",
        "F.normalize(features.to(self.features.dtype), p=2, dim=1, eps=1e-12)",
        "features.to(self.features.dtype)",
    ),
    (
        "labels: sum instead of mean",
        "core/labels.py",
        "torch.stack(losses).sum() / self.labels",
        "torch.stack(losses).sum()",
    ),
    (
        "labels: one bank for all",
        "core/labels.py",
        "self.method.observe(net.of_label(k), seen, state[k])",
        "self.method.observe(net.of_label(k), seen, state[0])",
    ),
    (
        "labels: every label sees the first",
        "core/split.py",
        "torch.stack((torch.zeros_like(p[:, label]), p[:, label]), dim=1)",
        "torch.stack((torch.zeros_like(p[:, 0]), p[:, 0]), dim=1)",
    ),
    ("statistics: of eight values of a segmenter", "core/split.py", "FEWEST if self.dense else 2", "2"),
    (
        "eata: prepared twice, counted twice",
        "core/preparing.py",
        "        fresh = fresh_state(adapter)\n",
        '        fresh = __import__("copy").deepcopy(adapter.state)\n',
    ),
    ("tent: flipped sign", "methods/tent.py", "return entropy", "return -entropy"),
    ("pl: everything is confident", "methods/pl.py", "confidence > self.threshold", "confidence > 0"),
    (
        "pl: a step without samples",
        "methods/pl.py",
        "            return None  #",
        "            return out.logits.sum() * 0  #",
    ),
    ("shot-im: diversity punished", "methods/shot_im.py", "+ negative_diversity", "- negative_diversity"),
    ("t3a: raw features in the prototypes", "methods/t3a.py", "unit=True, half", "half"),
    (
        "t3a: answers before it observes",
        "methods/t3a.py",
        "        remember(state, out.features, out.scores)\n\n    def predict",
        "        pass\n\n    def predict",
    ),
    ("eta: m from all samples", "methods/eta.py", 'out.memo["chosen"] = probs[chosen]', 'out.memo["chosen"] = probs'),
    (
        "eta: gradient through the weights",
        "methods/eta.py",
        "torch.exp(threshold - h.detach())",
        "torch.exp(threshold - h)",
    ),
    ("eta: margin of seven classes", "methods/eta.py", "self.margin * math.log(classes)", "self.margin * math.log(7)"),
    ("eata: gradient not squared", "methods/eata.py", "p.grad.square()", "p.grad.abs()"),
    ("eata: anchored at itself", "methods/eata.py", "(p - p0).square()", "(p - p.detach()).square()"),
    ("lame: own neighbour", "methods/lame.py", "distance.fill_diagonal_(torch.inf)", "distance"),
    ("lame: stops at once", "methods/lame.py", "if i > 1 and", "if i >= 0 or"),
    ("tsd: alignment pushes apart", "methods/tsd.py", "distillation + alignment *", "distillation - alignment *"),
    ("tsd: logits against probabilities", "methods/tsd.py", "(s.unsqueeze(1) - q)", "(p.unsqueeze(1) - q)"),
    ("tsd: target not detached", "methods/tsd.py", "soft_cross_entropy(s.detach(), u)", "soft_cross_entropy(s, u)"),
    ("tsd: 0/0 without survivors", "methods/tsd.py", "survivors.clamp(min=1)", "survivors"),
    (
        "tsd: a step of momentum without survivors",
        "methods/tsd.py",
        "if alignment == 0 and not bool(survivors > 0):",
        "if False:",
    ),
    ("tsd: consistency filter absent", "methods/tsd.py", "if self.consistency:", "if False:"),
    ("tsd: empty class at zero", "methods/tsd.py", "(bank.counts > 0).unsqueeze(1)", "(bank.counts > -1).unsqueeze(1)"),
    ("tsd: bank shares the head's memory", "methods/tsd.py", "net.weight.detach().clone()", "net.weight.detach()"),
    ("tsd: released with softmax once", "methods/tsd.py", "F.softmax(p.detach(), dim=1)).mean()", "p.detach()).mean()"),
    (
        "streams: slots cut on the wrong side",
        "data/streams.py",
        'np.arange(len(members)), side="right")',
        'np.arange(len(members)), side="left")',
    ),
    ("streams: domains share their draws", "data/streams.py", "spawn_key=key", "spawn_key=()"),
    ("loading: labels out of step with broken files", "data/loading.py", ", order[kept]", ", order[: kept.sum()]"),
    (
        "loading: channels normalised with the wrong deviation",
        "data/loading.py",
        "x.sub_(self.mean).div_(self.std)",
        "x.sub_(self.mean).div_(self.mean)",
    ),
    ("pictures: 12 bits pass for dark 16", "data/pictures.py", "(high > UNCLEAR or high == 0)", "True"),
    ("pictures: only the upper byte of deep colours", "data/pictures.py", "np.asarray(upper << 8 | lower)", "upper"),
    ("pictures: a crop is squashed", "data/pictures.py", "image = as_square(image, reading.resize)", "pass"),
    (
        "scanning: links back up are followed",
        "data/scanning.py",
        "self._skip(entry, BACK)\n            return False",
        "pass",
    ),
    (
        "scanning: a broken link stops all",
        "data/scanning.py",
        "except OSError as error:\n                self",
        "except KeyError as error:\n                self",
    ),
    ("folders: a list may name another domain's files", "data/datasets/folders.py", "parts[0] != folder or ", ""),
    ("folders: hidden files count", "data/scanning.py", 'entry.name.startswith(".") or ', ""),
    (
        "cifar: severities off by one",
        "data/datasets/cifar.py",
        "slice((severity - 1) * ROWS, severity * ROWS)",
        "slice(severity * ROWS, (severity + 1) * ROWS)",
    ),
    (
        "training: held-out images train",
        "source/train.py",
        "rng.choice(trains,",
        "rng.choice(np.arange(len(self.domains[d].labels)),",
    ),
    (
        "training: dropout depends on where it was stopped",
        "source/train.py",
        "torch.manual_seed(1_000_003 * self.recipe.seed + i)",
        "pass",
    ),
    ("training: resumed moments in another layout", "source/train.py", "if tensor.shape == like.shape:", "if False:"),
    (
        "training: the last of equals is kept",
        "source/train.py",
        "if score > self.best.score:",
        "if score >= self.best.score:",
    ),
    (
        "training: the unfinished file of another recipe is taken",
        "source/train.py",
        'if header["recipe"] != self.recipe',
        'if False and header["recipe"] != self.recipe',
    ),
    (
        "swad: ends one segment late",
        "source/swad.py",
        "while self.threshold is not None and len(self.waiting) > self.tolerate:",
        "while self.threshold is not None and len(self.waiting) >= self.tolerate:",
    ),
    ("swad: threshold without tolerance", "source/swad.py", "(1 + self.tolerance) * sum(last)", "sum(last)"),
    ("split: the same for all seeds", "source/split.py", "default_rng([seed, zlib", "default_rng([0, zlib"),
    (
        "metrics: bins not weighted",
        "bench/metrics.py",
        "abs(float(right[which == b].sum()) - float(confidence[which == b].sum()))",
        "abs(float(right[which == b].mean()) - float(confidence[which == b].mean())) if (which == b).any() else 0.0",
    ),
    (
        "records: a failure hides a finished run",
        "bench/records.py",
        '("results" in record or "results" not in records.get(record["id"], {}))',
        "True",
    ),
    ("records: a cut line swallows the next", "bench/records.py", 'if file.read(1) != b"\\n":', "if False:"),
    ("settings: a searched value counts as given", "bench/settings.py", "if key not in searched}", "}"),
    ("select: of equals the larger step", "bench/select.py", "best = max(search,", "best = max(reversed(search),"),
    ("select: searched on what trained", "bench/work.py", "_, held = split(domain", "held, _ = split(domain"),
    (
        "protocol: no reset between domains",
        "bench/protocol.py",
        "if self.reset and last is not None and here != last:",
        "if False:",
    ),
    (
        "protocol: a frozen pass that explains nothing",
        "bench/protocol.py",
        "if not torch.equal(again,",
        "if False and not torch.equal(again,",
    ),
    (
        "protocol: labels in the order of the files",
        "bench/judges.py",
        "labels, domains = self.place.labels[at], self.place.numbers[at]",
        "labels, domains = self.place.labels[np.sort(at)], self.place.numbers[at]",
    ),
    (
        "tables: deviation of the population",
        "report/tables.py",
        "sum(squares) / (len(numbers) - 1)",
        "sum(squares) / len(numbers)",
    ),
    ("tables: oracle is marked", "report/tables.py", 'cell is not None and row.select != "oracle"', "cell is not None"),
    (
        "masks: no Dice in the loss",
        "source/tasks.py",
        "return loss + 1 - ((2 * both + 1) / (sizes + 1)).mean()",
        "return loss",
    ),
    (
        "masks: probabilities over the rows",
        "source/tasks.py",
        "F.softmax(logits, dim=1), F.cross_entropy(logits, y)",
        "F.softmax(logits, dim=2), F.cross_entropy(logits, y)",
    ),
    (
        "masks: a label is one class, not all of its structure",
        "source/tasks.py",
        "truth = self.regions(y).float()",
        "truth = F.one_hot(y, logits.shape[1] + 1).movedim(-1, 1)[:, 1:].float()",
    ),
    ("masks: labels counted from probability 0.62 on", "source/tasks.py", "logits > 0 if", "logits > 0.5 if"),
    (
        "masks: left where it was when its image is turned",
        "data/transforms.py",
        "_pillow(mask).transform((width, height), Pillow.Transform.AFFINE, where,",
        "_pillow(mask).transform((width, height), Pillow.Transform.AFFINE, (1, 0, 0, 0, 1, 0),",
    ),
    (
        "masks: mirror images",
        "data/transforms.py",
        "(cos, -sin, x - cos * (x + right) + sin * (y + down),",
        "(-cos, sin, x + cos * (x + right) - sin * (y + down),",
    ),
    (
        "masks: classes between classes",
        "data/slices.py",
        "Pillow.Resampling.BILINEAR if smooth else Pillow.Resampling.NEAREST",
        "Pillow.Resampling.BILINEAR",
    ),
    (
        "masks: two scans of a patient on both sides of the split",
        "source/split.py",
        "np.isin(domain.labels, patients[:cut])",
        "np.isin(domain.case, patients[:cut])",
    ),
    (
        "masks: the score of training is a mean over batches",
        "source/train.py",
        "self.task.judge(np.sum(counts, axis=0))",
        "float(np.mean([self.task.judge(c) for c in counts]))",
    ),
    ("masks: backbones are downloaded", "source/nets.py", 'options.setdefault("weights_backbone", None)', "pass"),
    (
        "masks: trained on another part of the target",
        "source/checkpoints.py",
        'if name.partition(":")[0] in sources]',
        "if name in recipe.sources]",
    ),
    ("masks: names of classifiers change", "source/recipe.py", "in LATER or value}", "in LATER or True}"),
    (
        "masks: classes are enlarged, not probabilities",
        "data/slices.py",
        "volume.put_back(scores, outside).argmax(axis=0)",
        "volume.put_back((scores == scores.max(axis=0)).astype(np.float32), outside).argmax(axis=0)",
    ),
    (
        "masks: slices that were not shown count",
        "bench/judges.py",
        "self.seen[key].shown[z] = True",
        "self.seen[key].shown[:] = True",
    ),
    ("masks: cases of two domains are one", "bench/judges.py", "int(numbers[index]), number", "0, number"),
    (
        "masks: something beyond what the network saw",
        "data/slices.py",
        "np.eye(len(scores), dtype=np.float32)[0]",
        "np.eye(len(scores), dtype=np.float32)[1]",
    ),
    (
        "masks: voxels are cubes",
        "bench/judges.py",
        "measure_masks(seen.found, truth, volume.spacing)",
        "measure_masks(seen.found, truth, (1.0, 1.0, 1.0))",
    ),
    ("masks: patients share a batch", "bench/protocol.py", "other |= np.diff(place.labels[sequence]) != 0", "pass"),
    (
        "masks: labels adapted as classes",
        "bench/protocol.py",
        "seed=self.seed, multilabel=self.multilabel, pixels=pixels)",
        "seed=self.seed, pixels=pixels)",
    ),
    (
        "masks: hyper-parameters of images",
        "bench/settings.py",
        "values = resolve(method, hyper, select, dataset.task)",
        "values = resolve(method, hyper, select)",
    ),
    ("masks: the grid of images", "bench/grids.py", 'GRIDS if task == "classification" else PIXELS', "GRIDS"),
    (
        "masks: slices of a patient out of order",
        "data/streams.py",
        'np.argsort(rng.permutation(len(patients))[which], kind="stable")',
        "np.lexsort((rng.random(len(y)), rng.permutation(len(patients))[which]))",
    ),
    ("masks: tables show accuracy", "report/tables.py", "metric or _usual_metric(group)", 'metric or "accuracy"'),
    (
        "protocol: all broken files that a loader ever met",
        "bench/protocol.py",
        'sum(map(len, self.stream)) - results["images"]',
        "len(self.loader.broken)",
    ),
    ("guard: NaN rows are let in", "core/inputs.py", "bad = ~(sizes <= LARGEST)", "bad = sizes > LARGEST"),
    ("guard: huge rows are let in", "core/inputs.py", "bad |= sizes > times *", "bad |= sizes > 1e30 *"),
    (
        "guard: learns under suspicion",
        "core/watch.py",
        'FROZEN = ("suspect", "rolled back")',
        'FROZEN = ("rolled back",)',
    ),
    (
        "guard: goes back to the newest state",
        "core/watch.py",
        "self.kept = self.kept[:1]",
        "self.kept = self.kept[-1:]",
    ),
    ("guard: the cool-down never grows", "core/watch.py", "min(2 * m[", "min(1 * m["),
    ("guard: in fallback the adapter answers", "core/watch.py", "return theirs.to(answer.dtype)", "return answer"),
    (
        "guard: asking the source draws random numbers",
        "core/anchor.py",
        "with undisturbed(x.device):",
        "with torch.no_grad():",
    ),
    ("guard: asking the source writes to it", "core/anchor.py", "t.clone() if name in buffers else t", "t"),
    ("guard: a kept state goes on changing", "core/moments.py", "copy.deepcopy(moment.optimizer)", "moment.optimizer"),
    ("guard: reset leaves it as it is", "core/adapter.py", "            self._watch.restart()", "            pass"),
    (
        "guard: a bad row is answered with the others",
        "core/watch.py",
        "full[~bad] = answers",
        "full[: len(answers)] = answers",
    ),
    (
        "guard: steps go on after a rollback",
        "core/adapter.py",
        "                break  # the step",
        "                pass  # the step",
    ),
    (
        "guard: a parameter may become NaN",
        "core/watch.py",
        "if not bool(torch.nn.utils.get_total_norm(moved).isfinite()):",
        "if False:",
    ),
    ("rules: agreement counts chance", "core/rules.py", "(same - chance) / max(1 - chance, 1e-6)", "same"),
    ("rules: diversity without the source", "core/rules.py", "ratio = ours / max(theirs, 1e-3)", "ratio = ours / 2.3"),
    ("rules: a spike passes", "core/rules.py", "if gradient > limit else None", "if False else None"),
    (
        "robust: the batch's own statistics answer",
        "core/statistics.py",
        'elif name in ("source", "robust") or',
        'elif name in ("source",) or',
    ),
    ("robust: a frequent class weighs as much", "core/robust.py", ".clamp(max=1)", ".clamp(min=1, max=1)"),
    (
        "robust: deviation between images is forgotten",
        "core/robust.py",
        "(variances + (means - middle).square())",
        "variances",
    ),
    (
        "robust: learns from batches of any size",
        "core/adapter.py",
        ">= (1 if self.method.many_views else LEAST):",
        ">= 1:",
    ),
    (
        "robust: the source is no anchor",
        "core/robust.py",
        "torch.stack([1 - rate, rate * ANCHOR])",
        "torch.stack([1 - rate * (1 - ANCHOR), 0 * rate])",
    ),
    (
        "states: the oldest is taken up",
        "core/keeper.py",
        "for path in reversed(self.states()):",
        "for path in self.states():",
    ),
    ("states: all are kept", "core/keeper.py", "[*states, path][: -self.keep]", "[][: -self.keep]"),
    ("states: any moments are taken", "core/snapshot.py", "or values.keys() != usual.keys():", "or False:"),
    (
        "states: moments of any length are taken",
        "core/snapshot.py",
        "(value.shape != shape or not value.is_floating_point())",
        "False",
    ),
    ("states: a bank is taken as it is", "core/snapshot.py", "if verify is not None:", "if False:"),
    (
        "features: a feature is a pair with itself",
        "bench/features.py",
        "- float(np.square(part).sum())) / max(n * (n - 1), 1)",
        ") / max(n * n, 1)",
    ),
    (
        "features: raw ones instead of those on the sphere",
        "bench/features.py",
        "    return scaled\n",
        "    return features\n",
    ),
    (
        "features: those of intruders are kept",
        "bench/features.py",
        "enumerate(np.flatnonzero(own))",
        "enumerate(range(len(own)))",
    ),
    (
        "traces: predictions in place of labels",
        "bench/judges.py",
        "self.place.labels[np.concatenate(self.indices)]",
        "probs.argmax(axis=1)",
    ),
    ("versus: seconds of targets are averaged", "report/versus.py", 'SUMMED = ("seconds",)', "SUMMED = ()"),
    (
        "versus: a seed that lacks a target counts",
        "report/versus.py",
        "if None not in values}\n    together",
        "if any(values)}\n    together",
    ),
    ("recipes: what is given is forgotten", "bench/reproduce.py", "values | dict(given) |", "values |"),
    (
        "recipes: all methods of a cell are averaged",
        "bench/reproduce.py",
        "if of in (None, run.method)",
        "if of != run.method or True",
    ),
    (
        "recipes: a small run keeps its search",
        "bench/reproduce.py",
        '"select": ["default"], "seed": [0]}',
        '"seed": [0]}',
    ),
    ("sar: the second pass takes everybody back in", "methods/sar.py", 'reliable &= first["reliable"]', "pass"),
    (
        "sar: the last layers learn, too",
        "methods/sar.py",
        "max(1, len(layers) - math.ceil(part * len(layers)))",
        "len(layers)",
    ),
    ("sharpness: down the slope", "core/sharpness.py", "alpha=float(radius", "alpha=-float(radius"),
    ("sharpness: the weights stay where the second loss was", "core/sharpness.py", "p.copy_(value)", "pass"),
    (
        "deyo: samples that the shuffle leaves as they are",
        "methods/deyo.py",
        "(fall > self.fall)",
        "(fall <= self.fall)",
    ),
    ("deyo: weights with a gradient", "methods/deyo.py", "unit - h.detach())", "unit - h)"),
    (
        "roid: a uniform sample weighs most",
        "methods/roid.py",
        "(distance >= distance.mean())",
        "(distance <= distance.mean())",
    ),
    ("roid: the other prior correction", "methods/roid.py", 'prior: str = "logits"', 'prior: str = "probabilities"'),
    ("views: ROID repeats the edge", "augment.py", '_moved(view, 1.0, "reflection")', '_moved(view, 1.0, "border")'),
    (
        "params: frozen ones are trainable",
        "core/params.py",
        "wanted = lambda name: flags.get(name, True)",
        "wanted = lambda name: True",
    ),
    ("params: frozen ones are updated in silence", "core/effects.py", "if frozen and any(", "if False and any("),
    (
        "effects: quantised models are taken",
        "core/effects.py",
        'if quantised and method.params != "head":',
        "if False:",
    ),
    (
        "effects: params that match nothing wait for a batch",
        "core/effects.py",
        "check_precision(select(model, method.params, None), method)\n    elif",
        "pass\n    elif",
    ),
    ("roid: no way back to the source", "methods/roid.py", "p.lerp_(source, 1 - self.keep)", "pass"),
    ("memo: what one image taught stays", "methods/memo.py", 'return "reset"', "return None"),
    (
        "memo: the entropy of each view",
        "methods/memo.py",
        ".logsumexp(dim=0) - math.log(len(out.logits))",
        ".mean(dim=0)",
    ),
    (
        "note: entropy without a mean over classes",
        "methods/note.py",
        "(s + 1e-6).log()).mean()",
        "(s + 1e-6).log()).sum(dim=1).mean()",
    ),
    (
        "instance: own moments without a threshold",
        "core/instance.py",
        "(values.abs() - by).clamp(min=0)",
        "values.abs()",
    ),
    ("rotta: old images count more", "methods/rotta.py", "torch.sigmoid(-memory.age", "torch.sigmoid(memory.age"),
    ("rotta: the student answers", "methods/rotta.py", "out: Output = state.teacher(x)", "out: Output = net(x)"),
    ("cotta: the teacher is the student", "methods/cotta.py", "lerp_(p, 1 - self.momentum)", "copy_(p)"),
    ("cotta: nothing goes back to the source", "methods/cotta.py", "< self.restore", "< 0"),
    ("shot: labels of all samples", "methods/shot.py", "confidence > self.threshold", "confidence > 0"),
    (
        "rdumb: a fresh start one batch late",
        "methods/rdumb.py",
        "int(state.count) >= self.every",
        "int(state.count) > self.every",
    ),
    (
        "batches: a fresh start forgets how many there were",
        "core/adapter.py",
        "            self._random.restart()\n        return answer if",
        "            self._random.restart()\n            self.batches = -1\n        return answer if",
    ),
    ("saving: images are written without a word", "core/snapshot.py", "if info.images:", "if False:"),
    ("compare: a collapsed model looks sure", "deploy/compare.py", "diversity.clamp(min=1e-6) ** POWER", "1.0"),
    ("compare: a source at sea is believed", "deploy/estimates.py", "peer.value < AT_SEA", "False"),
    ("compare: too few images decide", "deploy/estimates.py", "if ahead.value <= ahead.doubt:", "if False:"),
    ("compare: presets have no guard", "deploy/compare.py", "guard=Guard() if self.guard else None", "guard=None"),
    ("tast: centroids of classes without supports", "methods/tast.py", " * (bank.counts > 0).unsqueeze(1)", ""),
    ("tast: answers from after the step", "methods/tast.py", "old.copy_(value)", "pass"),
    (
        "tast-bn: certain images leave",
        "methods/tast_bn.py",
        "order[entropy[order].argsort(stable=True)]",
        "order[entropy[order].argsort(stable=True, descending=True)]",
    ),
    (
        "adacontrast: keys of its own class push, too",
        "methods/adacontrast.py",
        "label.unsqueeze(1) == state.labels",
        "label.unsqueeze(1) < 0",
    ),
    ("adacontrast: the head's step as long as others", "methods/adacontrast.py", "old.lerp(p, 10.0)", "p"),
    (
        "labels: methods of one class take them",
        "core/labels.py",
        'if "one class" in self.method.info.needs:',
        "if False:",
    ),
    (
        "engine: blocks are never worked out again",
        "core/recompute.py",
        "if not torch.is_grad_enabled() or block in fitness.unfit:",
        "if True:",
    ),
    (
        "engine: a measured way is not taken along",
        "core/snapshot.py",
        "        if found:  #",
        "        if False:  #",
    ),
    (
        "engine: teachers run otherwise after a load",
        "core/snapshot.py",
        "for net in networks(twin):",
        "for net in [twin.net]:",
    ),
    (
        "engine: a layout is never taken back",
        "core/engine.py",
        "while moved and self.channels_last is not True:",
        "while False:",
    ),
    (
        "engine: all ways in one layout",
        "core/tuning.py",
        "trials.get(way.channels_last) or trials.setdefault(way.channels_last, net.clone())",
        "trials.get(None) or trials.setdefault(None, net.clone())",
    ),
    ("engine: a way that does not go is an error", "core/tuning.py", "way == ways[0] or _goes(step, way)", "True"),
    (
        "engine: moments keep their layout",
        "core/copying.py",
        "if value.shape != parameter.shape or value.stride() == parameter.stride():",
        "if True:",
    ),
    (
        "engine: squares of halves",
        "core/statistics.py",
        "x = x.to(torch.promote_types(x.dtype, torch.float32))  #",
        "pass  #",
    ),
    ("engine: a scale that never shrinks", "core/steps.py", "usual * 0.25**self.shrunk", "usual"),
    (
        "engine: a shrunken scale is not saved",
        "core/snapshot.py",
        'steps.shrunk = header["shrunk"]',
        "steps.shrunk = 0",
    ),
    (
        "low memory: a list that a block writes to",
        "core/recompute.py",
        "given = tree_map(lambda leaf: leaf, (args, kwargs))  #",
        "given = (args, kwargs)  #",
    ),
    (
        "low memory: a block that changes its input",
        "core/recompute.py",
        "if before != [t._version for t in held]:",
        "if False:",
    ),
    (
        "low memory: an input that is changed afterwards",
        "core/split.py",
        "if written := fitness.written():",
        "if written := set():",
    ),
    (
        "low memory: buffers of a pass that is taken again",
        "core/split.py",
        "                part.get_buffer(name).copy_(t)\n",
        "                pass\n",
    ),
    ("low memory: a block that runs twice", "core/split.py", 'set() if self.norm.startswith("ema") else None', "None"),
    (
        "low memory: forgotten before backward",
        "core/split.py",
        "with self._forgetting(), nullcontext() if self._compiles(rows)",
        "with nullcontext() if self._compiles(rows)",
    ),
    (
        "low memory: what a chain does by itself",
        "core/recompute.py",
        "type(module).forward is nn.Sequential.forward",
        "isinstance(module, nn.Sequential)",
    ),
    (
        "caches: what a model keeps of a forward stays",
        "core/split.py",
        "            model = self.plain()\n",
        "            model = self.model\n",
    ),
    (
        "caches: teachers keep theirs",
        "core/copying.py",
        "(adapter):\n            net.caches",
        "(adapter)[:1]:\n            net.caches",
    ),
    ("caches: whatever has a graph", "core/caches.py", "bool(graphs[0] & graphs[1])", "bool(graphs[1])"),
    ("caches: the source answers with what was learnt", "core/anchor.py", "adapter.net.plain()", "adapter.net.model"),
    (
        "caches: there when a block runs again",
        "core/recompute.py",
        "                caches.put(model, kept)\n",
        "                pass\n",
    ),
    ("caches: those of the user's model stay", "core/split.py", "self.train().eval()", "self.eval()"),
    ("steps: a device never leaves one out", "core/steps.py", "held = (~size.isfinite())", "held = (size != size)"),
    ("steps: those left out are counted", "core/steps.py", "            self._count -= int(held)\n", ""),
    ("steps: the host waits twice", "core/adapter.py", "devices.waits(size) and decides(optimizer)", "False"),
    (
        "flow: a bad first batch on a device",
        "core/probing.py",
        "    check_values(x)\n    net,",
        "    net,",
    ),
    ("engine: any gain is enough", "core/tuning.py", "GAIN * medians[ways[0]]", "medians[ways[0]]"),
    ("engine: the scale of fp16 stays in the gradient", "core/sharpness.py", "p.grad.div_(scale)", "pass"),
    (
        "engine: a graph with the source statistics",
        "core/split.py",
        'batch_statistics(self.model) if self.norm == "batch" else nullcontext()',
        "nullcontext()",
    ),
    (
        "parts: a failure leaves half of a batch",
        "core/undo.py",
        "        self._values.put_back()\n",
        "",
    ),
    (
        "instance: around the batch in every forward",
        "core/instance.py",
        "            if centred:\n",
        "            if True:\n",
    ),
    ("waiting: the host reads the survivors", "methods/tsd.py", "survivors.clamp(min=1)", "max(1, int(survivors))"),
]


def misfits() -> list[str]:
    """Mutants whose place is not, or not only once, in the source."""
    texts = {name: (ROOT / "src" / "trueup" / name).read_text() for _, name, _, _ in MUTANTS}
    return [what for what, name, old, _ in MUTANTS if texts[name].count(old) != 1]


def killer(mutant: tuple[str, str, str, str]) -> str | None:
    """The test that finds the bug; None if the mutant survives."""
    _, name, old, new = mutant
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        path = source / "trueup" / name
        text = path.read_text()
        path.write_text(text.replace(old, new))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
            "--no-header",
        ]
        command += ["--ignore=tests/test_models.py", "--ignore=tests/test_architecture.py"]
        command += [f"tests/{part}" for part in BENCHMARK] if name.split("/")[0] in BENCHMARK else CORE
        environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    return None if done.returncode == 0 else found[1] if found else done.stdout[-500:]


def main() -> None:
    if lost := misfits():
        sys.exit(f"these no longer fit the source: {lost}")
    wanted = [m for m in MUTANTS if all(word in m[0] for word in sys.argv[1:])]
    with ThreadPoolExecutor(2) as pool:
        alive = 0
        for (what, *_), test in zip(wanted, pool.map(killer, wanted), strict=True):
            print(f"{what:<55} {test or 'SURVIVES'}", flush=True)
            alive += test is None
    print(f"{len(wanted) - alive} killed, {alive} alive")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
