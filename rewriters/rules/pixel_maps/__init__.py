"""Rules of ops that move pixels, interpolate between pixels, or work along the channels of each pixel."""

__all__: list[str] = []
