"""Running plans. What stands where:

A stage

:mod:`.stage`            a program with the parameters and buffers that it reads; a whole model has one
:mod:`.registering`      the model's parameters and buffers, placed and registered under their names
:mod:`.state`            a parameter as it is stored and as it is used; :mod:`.hops`: the collectives between the two
:mod:`.gathering`        parameters that are gathered together; :mod:`.prefetch`: when
:mod:`.gradients`        a step's gradients on their way to the parameters; :mod:`.gradient_reduction`: collectives
:mod:`.renewed`          buffers of which the program is given a copy
:mod:`.compiled`         programs under torch.compile; :mod:`.compiled_order`: their collectives, alike on all ranks;
                         :mod:`.graphed`: a step as a CUDA graph

Two faces, which are ``torch.nn.Module``; :mod:`.spread` is what they share, :mod:`.spread_state` their state dicts

:mod:`.executor`         the model on one mesh; :mod:`.mesh_step`: a training step of it, in microbatches;
                         :mod:`.scaled_steps`: with a ``GradScaler``
:mod:`.crossing`         its program as a node of the caller's autograd graph; :mod:`.direct`: on one device
:mod:`.mesh_outputs`     what a call gives back; :mod:`.outputs`: each of it;
                         :mod:`.left_attributes`: what the model would leave in attributes
:mod:`.modes`            which modules train, and in which programs; :mod:`.kept_modes`: those that ``train()`` leaves
:mod:`.submodules`       what stands for the model's submodules; :mod:`.copied`: ``copy.deepcopy``;
                         :mod:`.statistics_anew`: ``update_bn``
:mod:`.pipeline`         the model in stages; :mod:`.pipeline_start`: what its ranks make together first
:mod:`.pipeline_programs`  its programs by shapes and by the model's values; :mod:`.runs`: any number of rows,
                         :mod:`.pipeline_runs`: as these go through its programs
:mod:`.loss_counts`      by what microbatches count in the loss; :mod:`.ready`: runs with their programs;
                         :mod:`.batch_statistics`: what each microbatch has of its own
:mod:`.pipeline_outputs`  what its forward gives
:mod:`.methods`          the model's methods, on whole values
:mod:`.work`             what one rank of it does in a step
:mod:`.flight`           a stage with the microbatches that are in flight; :mod:`.backward`: a backward in halves
:mod:`.arriving`         tensors of other stages, and where their gradients will be
:mod:`.wires`            messages between stages; :mod:`.ties`: parameters that several stages use
:mod:`.input_gradients`  gradients of a pipeline's inputs
:mod:`.schedule_check`   schedules that cannot be run
:mod:`.reached`          what gradients come to, where random numbers choose
:mod:`.taking_part`      ... and where experts have no rows
:mod:`.stagewise`        functions of torch that take the parameters of one rank for all there are

A call

:mod:`.calls`            however it is spelt; :mod:`.batch`: its tensors, checked and cut into microbatches
:mod:`.own_rows`         batches of which every rank has its own rows; :mod:`.own_rows_in_stages`: of a pipeline;
                         :mod:`.uneven_rows`: not equally many
:mod:`.buckets`          calls that are padded to one of a few shapes; :mod:`.relayout`: parameters in other pieces
:mod:`.same_batch`       whether all ranks were called alike; :mod:`.samples`: what they compare
:mod:`.seeds`            of random operators, one for each forward
:mod:`.values`           whether the model's Python values are those that were captured
:mod:`.ways_taken`       whether branches on data would go the ways that the program follows; :mod:`.to_host`: numbers
                         that the host reads when they have come
:mod:`.programs`         programs by these values and by :mod:`.module_calls`; :mod:`.recaptured`: how a module takes
                         another one
:mod:`.original`         the model after ``parallelize``; :mod:`.old_parameters`: its own parameters

Parameters in a script, which are DTensors

:mod:`.dtensor_fixes`    what torch gets wrong in silence; :mod:`.dtensor_writes`: of writes to parts
:mod:`.mixed`            plain tensors beside them
:mod:`.optimizer_steps`  steps of torch's optimizers, on pieces or on whole parameters
:mod:`.rounded_steps`    those of a policy with moments in fewer bits, or stochastic rounding

Ranks together

:mod:`.agree`            one plan, and errors that are raised everywhere; :mod:`.devices`: one device for each rank
:mod:`.threads`          threads that look into the store end before the interpreter does
:mod:`.groups`           process groups, each made once; :mod:`.plan_groups`: which ones a plan needs
:mod:`.failures`         a step that breaks on one rank; :mod:`.presence`: one that ends within ``parallelize``
:mod:`.store_meeting`    ranks tell each other through the store; :mod:`.ended`: that they have ended
:mod:`.checkpoint`       whole state dicts; :mod:`.saving`: into one file, as a script of one device does;
                         :mod:`.checkpoint_folder`: a run on disk, whole at any moment, with
                         :mod:`.generator_states`, in :mod:`.durable_files`;
                         :mod:`.safetensors_folder`: weights as others publish them, in :mod:`.safetensors_files`;
                         :mod:`.optimizers`: those made before, :mod:`.optimizer_state`: as one
                         device has it; :mod:`.init`: models without values
:mod:`.streams`          the one of an accelerator on which a step runs
:mod:`.launch`           processes on this machine; :mod:`.world`: many ranks in one process; :mod:`.collective_seconds`
"""
