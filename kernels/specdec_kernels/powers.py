"""Powers of 2, which sizes of tiles are."""


def power_of_2_from(number: int) -> int:
    """The least power of 2 that is not below."""
    return 1 << (number - 1).bit_length()


def power_of_2_to(number: int) -> int:
    """The largest power of 2 that is not above, or 1."""
    return 1 << max(number, 1).bit_length() - 1
