"""Training data: read files, tokenize them, pack the tokens, compute each batch from its step.

The parts, in the order in which data passes through them:

1. `find_data_files` finds the files of a recipe and their type, and `files` hashes them. Their digests
   are part of a store's identity. `remote_files` is the interface to files in buckets and on the
   hub.
2. `readers` has a reader per `data.type`. It yields `Record`s of a file with columns, `TextChunk`s
   of a text, or `IdsChunk`s of a previously tokenized file.
3. `fields` compiles the recipe's settings into an `ExampleBuilder`, which makes an `Example` of
   each record: segments of text or token ids with loss weight 0 or 1, for the decoder (`target`)
   and for an encoder (`source`).
4. `records` divides files into shards, and reads the examples of a shard through a reader and a builder.
5. `encode` tokenizes batches of examples into `EncodedBatch`es (ids and loss weights) in threads.
6. `shards` writes the missing shards of a token store, each under a temporary name until it is complete. `store` reads
   it. A store serves all sequence lengths and batch sizes. `document_rows` stores the documents of each row in
   the folder of the store.
7. `tokenize` connects these parts and looks in the cache first. The identity of a store is a digest
   of everything that changes its bytes.
8. `packing`, `packed_documents`, `seq2seq` and `span_corruption` are datasets: they return any rows
   of a store as arrays, without iterator state. The loss weight of a position is the weight of its
   target token. `order` computes the rows of each step and their epochs, for one source or a
   mixture of several. It depends on no other module of the project.
"""
