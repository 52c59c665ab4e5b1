"""A stand-in for vLLM, written from the interface of vLLM 0.33.0 (commit 4ba787ec9): names, arguments, order of calls.

It has what sleep mode and its plug-ins need, and nothing that computes. Where vLLM loads a model, a test gives a function.
"""

__version__ = "0.33.0"
