"""What keeps a run's processes going: parts that are started again when they die. `run` composes them."""
