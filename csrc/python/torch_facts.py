"""What the build has to know of the torch that is installed, as one CMake list:
version;platform;folder;runtime;blaslt, the last two empty where torch has none.

runtime and blaslt are the files that torch itself has loaded. Linking them by their path writes the names
that they call themselves into the extension, and the loader then finds them among what torch has loaded
already: a wheel of ROCm's torch carries its own runtime under a name that no system's library has.
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
print(torch.__version__, platform, Path(torch.__file__).parent, *(paths or ("", "")), sep=";")
