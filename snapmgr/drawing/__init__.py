"""Draws charts as self-contained SVG for the pages of the benchmark and of a tuning. Pure: numbers in, text out.

Pages may import any module here; `svg` holds the parts that they share: frame, texts, lines, scales and ticks.
"""
