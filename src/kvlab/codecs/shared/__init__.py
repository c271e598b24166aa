"""What several codecs share: blocks of tokens, lattices, rotation, whitening, tables, tokens that stay exact."""
