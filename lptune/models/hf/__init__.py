"""transformers' own modelling code as a Backbone (models/backbone.py): any causal language model it builds.

    facts.py      config.json -> HFFacts, and what is refused
    model.py      the modules of a transformers model, under their names, with the forward of a Backbone
    attention.py  attention and masks, registered with transformers: ours, so that documents stay apart
    mixers.py     recurrent mixers: each document is a row of a batch of its own
    experts.py    the experts of a mixture as grouped linear layers
    names.py      stored tensors -> parameters, as transformers loads them
    float32.py    the parameters that keep float32 in a bfloat16 run
    check.py      before a run: do packed documents stay apart, and are hidden states those of transformers?

Nothing outside of this folder knows of it; members.py asks it last. Only local files are read, no code that
comes with a checkpoint runs, and nothing is unpickled: the weights are read by checkpoint/hf.py, box by box.
"""
