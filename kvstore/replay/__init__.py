"""What a store would earn: its own index, eviction and admission over a recorded trace."""
