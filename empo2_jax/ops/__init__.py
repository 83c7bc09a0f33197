"""Pure numerics: no state, no files, no configuration."""
