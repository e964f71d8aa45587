"""Training data: read files, tokenize them, pack the tokens, compute each batch from its step.

The modules, in the order in which data passes through them:

1. `files` identifies data files by their digests. `find_files` and `dataset_layout` find the files of a recipe and
   their type, on this machine, in buckets and on the hub.
2. `readers` has a reader per `data.type`. It yields `Record`s of a file with columns, `TextChunk`s of a text, or
   `IdsChunk`s of a file of token ids. `columns` checks the values of a record.
3. `fields` compiles the recipe's settings into an `ExampleBuilder`, which makes an `Example` of each record: segments
   of text or token ids with loss weights, for the decoder (`target`) and for an encoder (`source`).
   `chat` does so for conversations: `conversations` reads the messages, `chat_forms` adapts them to a
   `chat_template`, which renders them, and `chat_turns` finds the turns in the text.
4. `records` divides files into shards, and reads the examples of a shard. `encode` tokenizes them in threads.
5. `shards` writes the missing shards of a token store, each under a temporary name until it is complete. `store` reads
   it. A store serves all sequence lengths and batch sizes. `document_rows` stores the documents of each row in it.
6. `tokenize` connects these parts and looks in the cache first. `tokenize_config` has the identity of a store, a
   digest of everything that changes its bytes.
7. `packing` and `seq2seq` have the datasets: they return any rows of a store as arrays, without iterator state. The
   loss weight of a position is the weight of its target token. `order` computes the rows of each step and their
   epochs, for one source or a mixture of several. It depends on no other module of the project.
"""
