"""A small vision Transformer on Fashion-MNIST: 60,000 images of clothing, 28 x 28 pixels, in 10 classes.

    python train.py --config=configs/fashion_mnist_vit.py --config.data.dir=DIR --workdir=runs/fashion_mnist_vit

DIR contains the files of Fashion-MNIST as they were published, plain or compressed (.gz): train-images-idx3-ubyte,
train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte. The last tenth of the training images is the
validation split. On Debian, `apt install dataset-fashion-mnist` installs the files into
/usr/share/datasets/fashion-mnist. To use the data of TensorFlow Datasets (TFDS) instead, set --config.data.source=tfds
--config.data.splits.train='train[:90%]' --config.data.splits.validation='train[90%:]'. TFDS needs TensorFlow once, to
prepare the data.

We have not trained this recipe. Public repositories report an accuracy of 92.3 % for small vision Transformers that are
trained from scratch. The recipe shifts and mirrors the training images. --config.data.mixup=0.2 also mixes them.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.task = 'classification'
    config.model.update(kind='patches', num_layers=6, d_model=128, d_ff=256, num_heads=4, norm='pre',
                        activation='gelu', position='learned', dropout=0.1)
    config.model.update(patches={'patch': 4, 'pooling': 'mean'})  # 49 patches
    config.data.update(source='files', name='fashion_mnist', validation_share=0.1, crop=2, flip=True)
    config.batch.rows = 128
    config.optimizer.update(schedule='cosine', peak=1e-3, warmup=800)
    config.train.steps = 25_000  # 59 epochs
    config.eval.update(every=1000, metric='accuracy')
    return config
