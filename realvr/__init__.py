"""Latent visual reasoning: rollouts, GRPO and evidence on latents. Importing it loads no torch, vLLM, DeepSpeed or Ray."""
