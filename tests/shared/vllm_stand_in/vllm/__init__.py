"""A stand-in for vLLM, written from the interface of vLLM 0.33.0 (commit 4ba787ec9): names, arguments, order of calls.

It has what sleep mode and its plug-ins need, and nothing that computes. Where a test of sleep mode loads a model, it gives a
function. The loaders of models are written from vLLM 0.26.0 (model_executor).
"""

__version__ = "0.33.0"
