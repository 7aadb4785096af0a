"""gfx942 code objects: kernels with their descriptors and metadata, loaded into this process."""

import ctypes
import struct

import msgspec
from emulator import elf_loader

S_ENDPGM = 0xBF810000


class Kernel:
    """A kernel's descriptor and its entry in the metadata."""

    def __init__(self, module, meta):
        self.module, self.meta, self.name = module, meta, meta[".name"]
        self.descriptor = module.base + module.symbols[meta[".symbol"]]
        descriptor = ctypes.string_at(self.descriptor, 64)

        def read(offset, fmt):
            return struct.unpack_from(fmt, descriptor, offset)[0]

        self.lds, self.scratch = read(0, "<I"), read(4, "<I")
        self.entry = self.descriptor + read(16, "<q")
        self.rsrc1, self.rsrc2 = read(48, "<I"), read(52, "<I")
        self.properties, self.preload = read(56, "<H"), read(58, "<H")
        self.explicit = [a for a in meta[".args"] if not a[".value_kind"].startswith("hidden")]
        self.keeps_denormals = (self.rsrc1 >> 16 & 3) == 3
        assert (self.rsrc1 >> 12 & 3) == 0, "rounds to nearest"
        self.preloaded = self.preload & 0x7F
        if self.preloaded:
            self.entry += 256  # as firmware that preloads arguments does
        self.is_empty = ctypes.c_uint32.from_address(self.entry).value == S_ENDPGM


class Module:
    """A code object in memory, relocated as a HIP runtime does."""

    def __init__(self, blob):
        image, sections, relocs = elf_loader(blob)
        for off, sym, typ, add in relocs:
            assert typ == 5, typ
            image[off : off + 8] = struct.pack("<q", sym - off + add)
        self.size = len(image)
        self.memory = ctypes.create_string_buffer(self.size + 0x2000)
        self.base = (ctypes.addressof(self.memory) + 0xFFF) & ~0xFFF
        ctypes.memmove(self.base, bytes(image), self.size)
        assert struct.unpack_from("<I", blob, 0x30)[0] & 0xFF == 0x4C, "gfx942"
        note = next(s.content for s in sections if s.name == ".note")
        name_size, data_size, _ = struct.unpack_from("<III", note)
        begin = 12 + (name_size + 3 & ~3)
        meta = msgspec.msgpack.decode(note[begin : begin + data_size])
        named = {s.name: s for s in sections}
        table, strings = named[".dynsym"].content, named[".dynstr"].content
        self.symbols = {}
        for o in range(0, len(table), 24):
            at, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", table, o)
            self.symbols[strings[at : strings.index(b"\0", at)].decode()] = value
        self.kernels = {k[".name"]: Kernel(self, k) for k in meta["amdhsa.kernels"]}
