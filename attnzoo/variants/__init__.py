"""The zoo, one file each; `attnzoo.registry.CATALOGUE` names them."""
