"""Rules of ops that move pixels to other places, or interpolate between pixels."""

__all__: list[str] = []
