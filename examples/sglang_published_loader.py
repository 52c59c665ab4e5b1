"""A loader for SGLang 0.5.17: an engine that restarts adopts its weights from the shared store in place of reading files.

    import sglang
    from sglang_published_loader import PublishedLoader

    engine = sglang.Engine(model_path="MODEL", load_format=PublishedLoader)

The file has to be on the path of the engine's processes. Add what else changes your weights to the facts, such as where
experts are placed. Models whose load sets more than tensors are named in the log and loaded as usual.
"""

import copy
import hashlib
import os

import sglang
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.runtime_context import get_parallel

from torch_memory_saver import node_store

GROUPS = ("tp", "pp", "moe_ep", "moe_dp", "moe_tp", "attn_tp")


class PublishedLoader(DefaultModelLoader):
    model_config = None

    def __init__(self, load_config):
        load_config = copy.copy(load_config)
        load_config.load_format = LoadFormat.AUTO
        super().__init__(load_config)

    def load_model(self, *, model_config, device_config):
        self.model_config = model_config
        return super().load_model(model_config=model_config, device_config=device_config)

    def load_weights_and_postprocess(self, model, weights, target_device):
        """Adopt or load the weights of a new model. SGLang then processes them for its quantisation in either case."""
        config, self.model_config = self.model_config, None
        if config is None:  # an update of the weights of a running engine
            return super().load_weights_and_postprocess(model, weights, target_device)
        name, identity = self.names(config)
        load = model.load_weights
        model.load_weights = lambda weights: node_store.adopt_or_load(name, model, lambda: load(weights), identity=identity)
        try:
            return super().load_weights_and_postprocess(model, weights, target_device)
        finally:
            del model.load_weights

    def names(self, config):
        """Return the name of the weights of this rank, and the text that says from what they are made."""
        parallel = get_parallel()
        facts = {f"{group}_{what}": getattr(parallel, f"{group}_{what}") for group in GROUPS for what in ("rank", "size")}
        facts["model"] = [config.hf_config.architectures, str(config.dtype), config.quantization]
        facts["draft"] = self.load_config.draft_model_idx
        digest = hashlib.sha256(repr([config.model_path, facts]).encode()).hexdigest()
        files = self._prepare_weights(config.model_path, config.revision, True)[1]
        identity = node_store.identity_of(files, sglang=sglang.__version__, **facts)
        return f"sglang/{os.path.basename(config.model_path)}/{digest[:16]}", identity
