"""A small vision Transformer on MNIST: 60,000 handwritten digits of 28 x 28 pixels.

    python train.py --config=configs/mnist_vit.py --config.data.dir=DIR --workdir=runs/mnist_vit

DIR contains the files of MNIST as they were published, plain or compressed (.gz): train-images-idx3-ubyte,
train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte. The last tenth of the training images is the
validation split. To use the data of TensorFlow Datasets (TFDS) instead, set --config.data.source=tfds
--config.data.splits.train='train[:90%]' --config.data.splits.validation='train[90%:]'. TFDS needs TensorFlow once, to
prepare the data.

We have not trained this recipe.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.task = 'classification'
    config.model.update(kind='patches', num_layers=4, d_model=64, d_ff=128, num_heads=4, norm='pre', activation='gelu',
                        position='learned', dropout=0.1)
    config.model.update(patches={'patch': 4, 'pooling': 'mean'})  # 49 patches
    config.data.update(source='files', name='mnist', validation_share=0.1, crop=2, flip=False)
    config.batch.rows = 128
    config.optimizer.update(schedule='cosine', peak=1e-3, warmup=400)
    config.train.steps = 8400  # 20 epochs
    config.eval.update(every=840, metric='accuracy')
    return config
