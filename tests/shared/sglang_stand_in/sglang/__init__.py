"""A stand-in for SGLang's loading of models, written from SGLang 0.5.17: names, arguments, order of calls."""

__version__ = "0.5.17"
