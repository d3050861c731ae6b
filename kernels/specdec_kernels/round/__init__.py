"""The steps of a speculative round that run on the device. They prepare the inputs of a forward
pass, propose tokens by n-gram lookup, accept proposals greedily, and update the state."""
