"""The work: stages and the parts they use. The only package that imports mlx; never imports Hydra."""
