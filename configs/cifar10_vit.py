"""CIFAR-10, 60,000 colour images of 32 x 32 pixels in 10 classes: a small vision Transformer, for an accelerator.

    python train.py --config=configs/cifar10_vit.py --workdir=runs/cifar10_vit

The data (160 MB) must be prepared once, on this or on another machine. Only this preparation needs TensorFlow:

    pip install tensorflow && tfds build cifar10 --file_format=array_record

We have not trained this recipe. Public repositories report accuracies of 86.3 to 91 % for small vision Transformers
that are trained from scratch. The higher accuracies need more augmentation than the crops and flips of this recipe.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.task = 'classification'
    config.model.update(kind='patches', num_layers=8, d_model=256, d_ff=512, num_heads=8, norm='pre',
                        activation='gelu', position='learned', dropout=0.1, dtype='bfloat16')
    config.model.update(patches={'patch': 4, 'pooling': 'mean'})  # 64 patches
    config.data.update(source='tfds', name='cifar10', crop=4, flip=True)
    config.data.splits.update(train='train[:90%]', validation='train[90%:]', test='test')
    config.batch.rows = 256
    config.optimizer.update(schedule='cosine', peak=1e-3, warmup=2000, clip=1.0)
    config.train.steps = 35_000  # 199 epochs
    config.eval.update(every=1760, metric='accuracy')
    return config
