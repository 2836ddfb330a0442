"""Latent visual reasoning: rollouts, GRPO, evidence on latents. Importing it loads no torch, vLLM, DeepSpeed or Ray."""
