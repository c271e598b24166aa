"""One model on several processes: heads or tokens split between ranks, prefill and decode apart, codecs with them."""
