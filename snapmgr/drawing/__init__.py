"""Charts as SVG for pages that need nothing else: of the benchmark and of a tuning. Pure: numbers in, text out.

Pages import any of them; `svg` has what they share: frame, texts, lines, scales and ticks.
"""
