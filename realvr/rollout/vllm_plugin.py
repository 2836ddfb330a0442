"""Entry point of the group `vllm.general_plugins`: vLLM calls `register` in every process that it starts.

It adds a model class `Latent<architecture>` for each family (used by model runner V2, harmless under V1) and the weight
transfer back end `shm`. Nothing of vLLM is replaced: models without latents run as before.
"""

from realvr.families import family_names, get_family

PREFIX = "Latent"


def register() -> None:
    """Idempotent: vLLM may load plugins more than once in a process."""
    from vllm import ModelRegistry
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    known = set(ModelRegistry.get_supported_archs())
    for name in family_names():
        base = get_family(name).vllm_model.partition(":")[2]
        if PREFIX + base not in known:
            ModelRegistry.register_model(PREFIX + base, f"realvr.rollout.vllm_v2:{PREFIX}{base}")
    if "shm" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("shm", "realvr.rollout.weight_transfer", "ShmWeightTransferEngine")
