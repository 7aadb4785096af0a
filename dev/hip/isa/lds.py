"""LDS of the emulated device, and the search for races in it."""

import mmap
import re
from collections import Counter

import numpy as np
from corrections import APERTURE, bits_of, lanes_of

BANKS = 32


def reserved(size: int) -> np.ndarray:
    """Bytes, zeros, that take memory where they are touched."""
    no_reserve = 0x4000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)


class Lds:
    """64 KiB at the start of a reserved range: the emulator touches the addresses of inactive lanes, too."""

    def __init__(self):
        self.words = reserved(9 << 30)[: 4 * 32768].view(np.uint32)
        self.at = self.words.ctypes.data

    def fill(self, size):
        self.size = size
        self.words[:] = 0xFFFFFFFF

    def intact(self):
        return bool((self.words[(self.size + 3) // 4 :] == 0xFFFFFFFF).all())


class Races:
    """Pairs of LDS accesses by two waves, one a write, without a barrier in between, in whatever order."""

    def __init__(self):
        self.found, self.checked = Counter(), 0
        self.reset()

    def reset(self):
        self.write_epoch, self.read_epoch = np.full(16384, -1), np.full(16384, -1)
        self.write_wave, self.readers = np.full(16384, -1), np.zeros(16384, np.int64)

    def access(self, kernel, name, pc, words, writes, wave, epoch):
        self.checked += 1
        words = np.unique(words)
        other = (self.write_epoch[words] == epoch) & (self.write_wave[words] != wave)
        if writes:
            other |= (self.read_epoch[words] == epoch) & (self.readers[words] & ~(1 << wave) != 0)
        if other.any():
            self.found[kernel, name, pc] += 1
        if writes:
            self.write_epoch[words], self.write_wave[words] = epoch, wave
        else:
            fresh = words[self.read_epoch[words] != epoch]
            self.readers[fresh] = 0
            self.read_epoch[words] = epoch
            self.readers[words] |= 1 << wave


class Conflicts:
    """Cycles that LDS instructions take: neighboring lanes are served at a time, as many as have 32 words in
    all, and a bank gives one word per cycle."""

    def __init__(self):
        self.cycles = {}  # kernel and offset of the instruction: the most cycles of an access
        self.reset = lambda: None

    def access(self, kernel, name, pc, words, writes, wave, epoch):
        lanes = max(1, BANKS // len(words))
        cycles = 0
        for first in range(0, words.shape[1], lanes):
            used = np.unique(words[:, first : first + lanes])
            cycles += int(np.bincount(used % BANKS).max())
        self.cycles[kernel, pc] = max(cycles, self.cycles.get((kernel, pc), 0))


def lds_access(name, word):
    """For an LDS instruction: a function of the wave that gives its words by lane, and whether it writes."""
    if name.startswith("FLAT_STORE_DWORD"):
        addr, offset = word >> 32 & 0xFF, word & 0xFFF

        def flat_words(wave):
            on = [k for k in lanes_of(wave) if wave.vgpr[addr + 1, k] == APERTURE]
            return (wave.vgpr[addr, on].astype(np.int64) + offset)[None] // 4

        return flat_words, True
    m = re.fullmatch(r"DS_(READ|WRITE)(2)?(ST64)?_B(\d+)|DS_(ADD)(_RTN)?_[UF](\d+)", name)
    if not m:
        return None
    bits = bits_of(word)
    if m[5]:
        return None  # atomic: every order is right
    size, addr = int(m[4]) // 8, bits(39, 32)
    unit = size * (64 if m[3] else 1)
    offsets = [bits(7, 0) * unit, bits(15, 8) * unit] if m[2] else [bits(15, 0)]

    def words(wave):
        at = wave.vgpr[addr, lanes_of(wave)].astype(np.int64)
        return np.stack([(at + o) // 4 + i for o in offsets for i in range(max(1, size // 4))])

    return words, m[1] == "WRITE"
