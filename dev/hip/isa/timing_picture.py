"""A timeline of the waves of a compute unit, as SVG."""

from html import escape

from timing_unit import SIMDS, Unit

COLORS = {"mfma": "#c0392b", "vector": "#2980b9", "packed": "#16a085", "trans": "#8e44ad", "lds": "#f39c12"}
COLORS |= {"memory": "#27ae60", "barrier": "#000000"}
WIDTH, ROW, LEFT, TOP = 1200, 18, 90, 40


def picture(unit: Unit, window: tuple[float, float], title: str) -> str:
    """A row per wave, by SIMD: what it issues and for how long that occupies its unit."""
    begin, end = window
    order = sorted(
        range(len(unit.waves)), key=lambda w: (unit.waves[w].number % SIMDS, unit.waves[w].block, w)
    )
    row = {w: TOP + ROW * i for i, w in enumerate(order)}
    scale = (WIDTH - LEFT) / (end - begin)
    height = TOP + ROW * len(order) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"',
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="14">{escape(title)}: {end - begin:.0f} cycles</text>',
    ]
    for i, (kind, color) in enumerate(COLORS.items()):
        parts.append(f'<rect x="{LEFT + 90 * i}" y="20" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{LEFT + 14 + 90 * i}" y="29">{kind}</text>')
    for w in order:
        wave = unit.waves[w]
        label = f"SIMD {wave.number % SIMDS}, wave {wave.block}.{wave.number}"
        parts.append(f'<text x="2" y="{row[w] + 12}" font-size="9">{label}</text>')
    for w, time, cycles, kind in unit.events or []:
        if kind in COLORS and begin <= time < end:
            x, y = LEFT + scale * (time - begin), row[w] + (1 if kind == "mfma" else 5)
            h = ROW - 3 if kind == "mfma" else ROW - 10
            size = f'width="{max(0.4, scale * cycles):.1f}" height="{h}"'
            parts.append(f'<rect x="{x:.1f}" y="{y}" {size} fill="{COLORS[kind]}"/>')
    return "\n".join([*parts, "</svg>", ""])
