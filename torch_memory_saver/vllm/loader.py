"""A model loader of vLLM: a restarted engine adopts its weights from the shared store in place of reading files.

It needs vLLM, and is imported when an engine selects it (``plugin``). It takes one step of vLLM's loading, the one that
fills the parameters from the checkpoint: it adopts them, or has the loader of another load format fill them and publishes
them. So weights are published as the checkpoint has them, before ``process_weights_after_loading``. vLLM applies a
quantisation method to them in each process, to tensors and in Python.

The load formats are those whose files vLLM's default loader reads, each rank for itself. Others are refused by name, as are
models whose loading sets more than tensors (:func:`torch_memory_saver.node_store.adopt_or_load`), such as those that are
quantised while they are loaded, and those of bitsandbytes and torchao. The weights are then loaded as without this loader.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import re
from typing import Any

import vllm
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from torch_memory_saver import _core, node_store

__all__ = ["PublishedLoader"]

logger = logging.getLogger("torch_memory_saver")

#: The key of ``model_loader_extra_config`` that names the format of the files.
_FORMAT = "load_format"
#: Formats whose files each rank reads for itself. With other formats, ranks that adopt would keep the rest waiting.
_FORMATS = ("auto", "hf", "mistral", "npcache", "pt", "safetensors")
#: Digits of the hash in a name, and the most characters of the model in it.
_DIGITS, _LONGEST = 16, 64
_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]")


@register_model_loader("torch_memory_saver")
class PublishedLoader(BaseModelLoader):  # type: ignore[misc]
    """vLLM's interface to published weights. The loader of the files' format does everything else."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        config = copy.copy(load_config)
        extra = dict(load_config.model_loader_extra_config)
        config.load_format, config.model_loader_extra_config = extra.pop(_FORMAT, "auto"), extra
        self._loader = get_model_loader(config)
        #: The configuration of the engine and the prefix of the model, during a first load.
        self._engine: tuple[Any, str] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def download_model(self, model_config: Any) -> None:
        """Download the files."""
        self._loader.download_model(model_config)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Construct a model with its weights, see vLLM's base class. With ``TMS_DISABLE=1`` the other loader does it."""
        name = self._loader.load_config.load_format
        if _core.get_disabled() or name not in _FORMATS:
            if not _core.get_disabled():
                logger.warning(
                    "vLLM loads '%s' without published weights: the load format '%s' is not one of %s",
                    model_config.model,
                    name,
                    ", ".join(_FORMATS),
                )
            return self._loader.load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        self._engine = vllm_config, prefix
        try:
            return super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        finally:
            self._engine = None

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fill the weights of a model: adopt them or load and publish them if the model is new, otherwise load them."""

        def load() -> None:
            self._loader.load_weights(model, model_config)

        names = None if self._engine is None else self._names(model, model_config, *self._engine)
        if names is None:
            load()
        else:
            node_store.adopt_or_load(names[0], model, load, identity=names[1])

    def _names(self, model: Any, model_config: Any, vllm_config: Any, prefix: str) -> tuple[str, str] | None:
        """Return the name of the weights and their identity, or None after a warning that says why there is none."""
        try:
            facts = self._facts(model_config, vllm_config.parallel_config, prefix)
            identity = node_store.identity_of(self._files(model, model_config), vllm=vllm.__version__, **facts)
        except Exception as error:  # a part of vLLM has changed, or a file is missing, about which the load says more
            logger.warning(
                "vLLM loads '%s' without published weights: %s: %s", model_config.model, type(error).__name__, error
            )
            return None
        folder = _UNUSUAL.sub("-", os.path.basename(os.path.normpath(model_config.model)))[-_LONGEST:]
        kind = facts["quantization"] or facts["dtype"]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:_DIGITS]
        return f"vllm/{folder}/{kind}/rank{facts['rank']}/{digest}", identity

    def _facts(self, model_config: Any, parallel: Any, prefix: str) -> dict[str, Any]:
        """Return on what the tensors of this rank depend, apart from the files and versions.

        The name of the weights is made of these facts, so a changed checkpoint takes the place of the old one, and nothing
        else does. vLLM's own hashes say which settings may change a model. They lack the ranks.
        """
        return {
            "model": model_config.model,
            "prefix": prefix,
            "architectures": getattr(model_config.hf_config, "architectures", None),
            "dtype": str(model_config.dtype).removeprefix("torch."),
            "quantization": model_config.quantization,
            "rank": parallel.rank,
            "data_parallel_rank": parallel.data_parallel_rank,
            "sizes": [
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                parallel.data_parallel_size,
                parallel.enable_expert_parallel,
            ],
            "hashes": [model_config.compute_hash(), parallel.compute_hash()],
            "format": self._loader.load_config.load_format,
        }

    def _files(self, model: Any, model_config: Any) -> list[str]:
        """Return the files that the other loader reads, which are downloaded if necessary."""
        fall_back = getattr(model, "fall_back_to_pt_during_load", True)
        patterns = getattr(model, "allow_patterns_overrides", None)
        find = self._loader._prepare_weights
        found: list[str] = find(model_config.model, None, model_config.revision, fall_back, patterns)[1]
        for other in getattr(model, "secondary_weights", ()):
            patterns = other.allow_patterns_overrides
            found += find(other.model_or_path, other.subfolder, other.revision, other.fall_back_to_pt, patterns)[1]
        return found
