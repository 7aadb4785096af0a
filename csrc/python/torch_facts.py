"""What the build has to know of the torch that is installed, as one CMake list:
version;platform;toolkit;folder;runtime;blaslt, empty what torch has not.

toolkit is the version of CUDA or HIP that torch was built with. runtime and blaslt are the files that torch
itself has loaded. Linking them by their path writes the names that they call themselves into the extension,
and the loader then finds them among what torch has loaded already, or llamac/base/native.py: a wheel of
ROCm's torch carries its own runtime under a file name that is not the one it calls itself.
"""

from pathlib import Path

import torch

if torch.version.hip:
    platform, libraries = "amd", ("libamdhip64", "libhipblaslt")
elif torch.version.cuda:
    platform, libraries = "nvidia", ("libcudart", "libcublasLt")
else:
    platform, libraries = "cpu", ()

loaded = {
    line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line
}
paths = [next((p for p in sorted(loaded) if Path(p).name.startswith(f"{name}.so")), "") for name in libraries]
toolkit = torch.version.hip or torch.version.cuda or ""
print(torch.__version__, platform, toolkit, Path(torch.__file__).parent, *(paths or ("", "")), sep=";")
