"""What stands in a codec's place without being one: identity, noise, cast, isotropic error."""
