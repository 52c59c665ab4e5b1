"""The platform, of which a test may change `kind`."""


class Platform:
    kind = "cuda"

    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    def is_cuda_alike(self) -> bool:
        return self.kind in ("cuda", "rocm")


current_platform = Platform()
