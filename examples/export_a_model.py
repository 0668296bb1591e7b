"""Adapt to a stream, then export the adapted model: as a plain module, with torch.export, to ONNX."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor

import trueup
from trueup.testing import convnet, images

Answer = Callable[[Tensor], Tensor]

torch.set_num_threads(1)  # the toy model is trained here, and its last bits depend on the number of threads
model = convnet()  # any trained torch.nn.Module
stream = [images(64, seed=step, shift=1.3) for step in range(30)]


def accuracy(answer: Answer, batches: list[tuple[Tensor, Tensor]]) -> str:
    with torch.no_grad():
        return f"{torch.cat([answer(x).argmax(dim=1) == y for x, y in batches]).float().mean():6.1%}"


def exported(plain: torch.nn.Module, folder: str) -> tuple[Answer, Answer]:
    """Return the model as torch.export and ONNX Runtime run it, for any batch size."""
    program = torch.export.export(plain, (stream[0][0],), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    written = torch.onnx.export(program, dynamo=True, verbose=False)
    assert written is not None
    written.save(Path(folder) / "adapted.onnx")
    session = onnxruntime.InferenceSession(Path(folder) / "adapted.onnx")
    name = session.get_inputs()[0].name
    return program.module(), lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


last = stream[-10:]
print(f"accuracy on the last 10 of {len(stream)} batches; the source model: {accuracy(model, last)}")
print("method   adapter  unwrapped  torch.export    ONNX  statistics='source'")
for method in ("bn", "tsd", "t3a"):  # T3A warns that its prototypes are lost
    adapter = trueup.adapt(model, method)
    for x, _ in stream[:-10]:
        adapter(x)
    online = accuracy(adapter, last)
    plain, source = adapter.unwrap(), adapter.unwrap(statistics="source")
    with tempfile.TemporaryDirectory() as folder:
        program, session = exported(plain, folder)
        columns = [accuracy(answer, last) for answer in (plain, program, session, source)]
    print(f"{method:8} {online}     {columns[0]}        {columns[1]}  {columns[2]}               {columns[3]}")
