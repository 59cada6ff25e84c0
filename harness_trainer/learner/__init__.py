"""From finished rollouts to better weights: rows, advantages, TRL's asynchronous GRPO trainer, weight transfer."""
