"""Measurements of the product on the machine at hand: ratios within one run, not records."""
