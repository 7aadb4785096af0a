"""Instructions that the emulator lacks or gets wrong, executed here or refused. README.md lists them."""

import ctypes
import re

import numpy as np
from fp8 import decode, encode, largest_of

# Instructions that the emulator gets wrong: a kernel with one that is not executed here is not checked.
REFUSED = re.compile(
    r"_DPP|ROW_BCAST|GETPC|SETPC|SWAPPC|BUFFER_|CMPSWAP|SWIZZLE|MEMTIME|MEMREALTIME|LOAD_LDS|"
    r"ATOMIC_PK|XF32|MFMA_I32|_FP8|_BF8|SMFMAC|PERMLANE"
)

FORMS = {"F": "e4m3fnuz", "B": "e5m2fnuz"}  # of gfx942: FP8 and BF8
APERTURE = 0x00010000  # the upper half of a flat address in LDS


def lanes_of(wave):
    mask = int(wave.sgpr[126]) | int(wave.sgpr[127]) << 32
    return np.nonzero(np.array([mask >> i & 1 for i in range(64)], bool))[0]


def bits_of(word: int):
    """bits(hi, lo) of an instruction word."""

    def bits(hi: int, lo: int) -> int:
        return word >> lo & (1 << hi - lo + 1) - 1

    return bits


def corrected(name: str, word: int, lds):
    """A function of the wave that executes the instruction but for the PC; None: the emulator is right."""
    bits = bits_of(word)
    if name == "S_MOV_B64" and bits(7, 0) == 235:  # src_shared_base
        to = bits(22, 16)

        def shared_base(wave):
            wave.sgpr[to], wave.sgpr[to + 1] = 0, APERTURE

        return shared_base
    # From AGPRs; the emulator reads the VGPRs of the same number.
    if name.startswith("DS_WRITE_B") and bits(25, 25):
        count, offset, addr, data = int(name[10:]) // 32, bits(15, 0), bits(39, 32), bits(47, 40)

        def write(wave):
            on = lanes_of(wave)
            at = wave.vgpr[addr, on].astype(np.int64) + offset
            assert (at % 4 == 0).all() and (at + 4 * count <= lds.size).all(), "LDS address"
            for i in range(count):
                lds.words[at // 4 + i] = wave.acc[data + i, on]

        return write
    if name.startswith(("DS_WRITE", "DS_ADD")) and bits(25, 25):
        raise NotImplementedError(f"{name} from AGPRs")
    if name == "GLOBAL_ATOMIC_ADD" and bits(16, 16):  # sc0: returns the value before
        offset = bits(12, 0) - (bits(12, 12) << 13)
        addr, data, base, to = bits(39, 32), bits(47, 40), bits(54, 48), bits(63, 56)
        if bits(55, 55):
            raise NotImplementedError(f"{name} from AGPRs")

        def add(wave):
            for lane in lanes_of(wave):
                at = int(wave.vgpr[addr, lane]) + offset
                if base == 0x7F:  # off: the address is 64 bits of two VGPRs
                    at += int(wave.vgpr[addr + 1, lane]) << 32
                else:
                    at += int(wave.sgpr[base]) | int(wave.sgpr[base + 1]) << 32
                word = ctypes.c_uint32.from_address(at)
                value = int(wave.vgpr[data, lane])
                wave.vgpr[to, lane], word.value = word.value, (word.value + value) & 0xFFFFFFFF

        return add
    if m := re.fullmatch(r"FLAT_(STORE|LOAD)_DWORD(X\d)?", name):
        stores, count = m[1] == "STORE", int((m[2] or "X1")[1:])
        offset, addr, data, to, acc = bits(11, 0), bits(39, 32), bits(47, 40), bits(63, 56), bits(55, 55)

        def flat(wave):
            file = wave.acc if acc else wave.vgpr
            on = lanes_of(wave)
            loaded = np.zeros((count, len(on)), np.uint32)
            for k, lane in enumerate(on):
                low, high = int(wave.vgpr[addr, lane]), int(wave.vgpr[addr + 1, lane])
                if high == APERTURE:
                    assert low + offset + 4 * count <= lds.size, "LDS address"
                    words = lds.words[(low + offset) // 4 :]
                else:
                    at = (high << 32 | low) + offset
                    words = np.frombuffer((ctypes.c_uint32 * count).from_address(at), np.uint32)
                for i in range(count):
                    if stores:
                        words[i] = file[data + i, lane]
                    else:
                        loaded[i, k] = words[i]
            if not stores:
                for i in range(count):
                    file[to + i, on] = loaded[i]

        return flat
    if name.startswith("FLAT_"):
        raise NotImplementedError(name)
    if name in ("V_CVT_F16_F32_E32", "V_CVT_F32_F16_E32") and bits(8, 8):  # v128 is no upper half of v0
        to, source, narrows = bits(24, 17), bits(7, 0), name.startswith("V_CVT_F16")

        def convert(wave):
            on = lanes_of(wave)
            with np.errstate(over="ignore"):
                if narrows:
                    wave.vgpr[to, on] = (
                        wave.vgpr[source, on].view(np.float32).astype(np.float16).view(np.uint16)
                    )
                else:
                    halves = wave.vgpr[source, on].astype(np.uint16).view(np.float16)
                    wave.vgpr[to, on] = halves.astype(np.float32).view(np.uint32)

        return convert
    m = re.match(r"V_MFMA_F32_(16X16X16|32X32X8)_(B?F16)", name)
    if m and (bits(60, 59) or "32X32" in name):
        return mfma_16(32 if "32X32" in name else 16, m[2], bits)
    if m := re.fullmatch(r"V_MFMA_F32_16X16X32_([FB])P?F?8_([FB])P?F?8", name):
        return mfma_fp8(FORMS[m[1]], FORMS[m[2]], bits)
    if m := re.fullmatch(r"V_CVT_PK_([FB])P?F?8_F32", name):
        return pack_fp8(FORMS[m[1]], bits)
    if "MFMA" in name and "32X32" in name:
        raise NotImplementedError(name)
    return None


def mfma_16(R, kind, bits):
    """R x R sums of products of 16 bits, BF16 or F16, 256 / R deep."""

    def numbers(words):
        halves = np.stack([words[0] & 0xFFFF, words[0] >> 16, words[1] & 0xFFFF, words[1] >> 16])
        if kind == "F16":
            return halves.astype(np.uint16).view(np.float16).astype(np.float64)
        return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    return mfma(R, numbers, numbers, bits)


def mfma_fp8(form_a, form_b, bits):
    """16 x 16 sums of fp8 products, 32 deep. The first of a lane's eight codes is the lowest byte."""

    def numbers_of(form):
        return lambda words: decode(np.ascontiguousarray(words.T).view(np.uint8).T, form)

    return mfma(16, numbers_of(form_a), numbers_of(form_b), bits)


def mfma(R, numbers_a, numbers_b, bits):
    """R x R sums of products. numbers: n of float64 from a lane's two words, in the order of k.

    A and B: lane l holds row l % R, k = n (l / R) + j. D: register i of lane l holds column l % R; its row is
    8 (i / 4) + 4 (l / 32) + i % 4 for R = 32, and 4 (l / 16) + i for R = 16.
    """
    groups = 64 // R
    d, a, b, c = bits(7, 0), bits(40, 32), bits(49, 41), bits(58, 50)
    acc_d, acc_ab = bits(15, 15), bits(60, 59)
    lane = np.arange(64)

    def row(i):
        return 4 * groups * (i // 4) + 4 * (lane // R) + i % 4

    def run(wave):
        def operand(src, acc, numbers):
            x = numbers((wave.acc if acc else wave.vgpr)[src - 256 : src - 254])
            n = len(x)
            out = np.zeros((R, n * groups))
            for j in range(n):
                out[lane % R, n * (lane // R) + j] = x[j]
            return out

        # [row of a][row of b]
        product = operand(a, acc_ab & 1, numbers_a) @ operand(b, acc_ab >> 1, numbers_b).T
        sums = wave.acc if acc_d else wave.vgpr
        for i in range(R * R // 64):
            old = sums[c - 256 + i].view(np.float32) if c >= 256 else wave.sgpr[c : c + 1].view(np.float32)
            sums[d + i] = (product[row(i), lane % R] + old).astype(np.float32).view(np.uint32)

    return run


def pack_fp8(form, bits):
    """Two f32 become codes in a half of a register, whose other half stays. What is too large becomes NaN."""
    to, negated, absolute, upper = bits(7, 0), bits(62, 61), bits(9, 8), bits(14, 14)
    sources = bits(40, 32), bits(49, 41)
    if bits(15, 15):
        raise NotImplementedError(f"a clamping conversion to {form}")

    def source(wave, i):
        at = sources[i]
        x = (wave.vgpr[at - 256] if at >= 256 else np.full(64, wave.sgpr[at])).view(np.float32)
        x = np.abs(x) if absolute >> i & 1 else x
        x = -x if negated >> i & 1 else x
        return encode(np.where(np.abs(x) > largest_of(form), np.nan, x), form).astype(np.uint32)

    def run(wave):
        codes, on = source(wave, 0) | source(wave, 1) << 8, lanes_of(wave)
        kept = wave.vgpr[to] & (0xFFFF if upper else 0xFFFF0000)
        wave.vgpr[to, on] = (kept | codes << (16 if upper else 0))[on]

    return run
