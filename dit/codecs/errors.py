"""What keeps a VAE or a text encoder from being used."""


class CodecError(ValueError):
    """The user must change something; the message says what."""
