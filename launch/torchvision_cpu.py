"""Let the package index's torchvision (a CUDA build) import beside a CPU-only torch.

torchvision registers fake kernels for operators that its compiled extension declares; without CUDA that extension
cannot load and the registration fails. Declaring the operators' schemas first makes the import succeed: everything in
`torchvision.transforms` is plain Python. torch calls `declare_missing_ops` at the end of `import torch` (entry-point
group `torch.backends`). It does nothing when torch has CUDA or ROCm, or when torchvision is itself a CPU build.
"""

import importlib.util
import re
from pathlib import Path

_library = None  # a torch.library.Library lives as long as its Python object


def declare_missing_ops() -> None:
    """Declare the schemas that torchvision's Python files decorate, if its extension cannot load here."""
    global _library
    import torch

    spec = importlib.util.find_spec("torchvision")
    if _library is not None or torch.version.cuda or torch.version.hip or spec is None or not spec.origin:
        return
    package = Path(spec.origin).parent
    version = (package / "version.py").read_text()
    if "+cpu" in version or re.search(r"^cuda\s*=\s*None", version, re.MULTILINE):
        return
    decorated = re.findall(r'register_fake\("torchvision::(\w+)"\)', (package / "_meta_registrations.py").read_text())
    try:
        _library = torch.library.Library("torchvision", "DEF")
        for name in sorted({*decorated, "nms"}):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except RuntimeError:  # the real extension has registered the namespace already
        _library = None
