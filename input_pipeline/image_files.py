"""Reads images from files, and classes from folders: CLASS/FILE.png."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageOps

from input_pipeline.examples import MAX_NAMES, Examples
from input_pipeline.splits import key
from runtime.errors import UserError, first_names
from runtime.files import files_in, is_broken_link
from runtime.once import log_once

SUFFIXES = ('.bmp', '.gif', '.jpeg', '.jpg', '.pgm', '.png', '.ppm', '.tif', '.tiff', '.webp')
GREY = ('1', 'L', 'LA')  # Pillow's modes of greyscale images
DEEP = ('I', 'F')  # Pillow's modes of images with more than 8 bits per channel begin with these letters


def image_paths(folder: Path) -> list[Path]:
    """Returns the images in a folder and its subfolders (`files_in`), in the order of their names."""
    return sorted(_images_in(folder))


def class_folders(folder: Path) -> list[Path]:
    """Returns the subfolders that contain images, in the order of their names."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir()
                  if path.is_dir() and not path.name.startswith('.') and any(_images_in(path)))


def check_classes(folder: Path, splits: Collection[str]) -> None:
    """Checks that the subfolders of a folder are classes, not splits that contain the classes.

    Args:
      folder: a folder without the folder of a training split, so that its subfolders are the classes.
      splits: the names of the other splits.

    Raises:
      UserError: if a subfolder with images has the name of a split. Also if no subfolder has images of its own, and all
        of them contain the same folders of images, at least two.
    """
    classes, reason = class_folders(folder), ''
    if found := [name for name in sorted(splits) if any(_images_in(folder / name))]:
        reason = f'config.data.splits contains {_quoted(found)}'
    elif not any(_is_image(path) for each in classes for path in each.iterdir()):
        inner = {tuple(path.name for path in class_folders(each)) for each in classes}
        if len(inner) == 1 and len(names := inner.pop()) > 1:
            reason = f'all of them contain the same folders of images, {_quoted(names)}'
    if reason:
        raise UserError(f'config.data.dir={str(folder)!r} has no folder train, so its folders '
                        f'{_quoted([path.name for path in classes])} would be the classes. But {reason}. Set the '
                        'folder of the training data, such as --config.data.splits.train=Training, or move the classes '
                        f'of the training data into {folder / "train"}')


def _quoted(names: Sequence[str]) -> str:
    return first_names([*map(repr, names)], MAX_NAMES)


def _images_in(folder: Path) -> Iterator[Path]:
    """Yields the images of `image_paths` in any order.

    Broken symbolic links are included, so that reading such a link raises an error with the name of the link.
    """
    return filter(_is_image, files_in(folder))


def _is_image(path: Path) -> bool:
    """Returns whether a path is the path of an image file, or of a broken symbolic link with the name of an image."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith('.') and (
        path.is_file() or is_broken_link(path))


def _paths_and_classes(folder: Path) -> list[tuple[Path, str]]:
    """Returns the path of each image FOLDER/CLASS/**/FILE, and the name of the folder CLASS."""
    return [(path, classes.name) for classes in class_folders(folder) for path in image_paths(classes)]


def read_class_folders(folder: Path, training: Path, size: int, all_grey: Callable[[Path], bool]) -> Examples:
    """Reads the images FOLDER/CLASS/**/FILE. The class of an image is the name of the folder CLASS.

    Args:
      folder: the folder of the split.
      training: the folder of the training split, which determines whether the images have one channel or three.
      size: config.data.image_size.
      all_grey: the function `all_grey` of this module, which may store its results.

    Raises:
      UserError: if an image cannot be read, or the images have different sizes and `size` is 0.
    """
    paths = _paths_and_classes(folder)
    images, keys = _read([path for path, _ in paths], 1 if all_grey(training) else 3, (size, size) if size else ())
    return Examples(images, np.array([name for _, name in paths]), str(folder),
                    places=tuple(str(path.relative_to(folder)) for path, _ in paths), resized=bool(size), keys=keys)


def read_images(paths: Sequence[Path], channels: int,
                size: Sequence[int] = (), resized: bool = True) -> UInt8[np.ndarray, 'images height width channels']:
    """Reads images with one channel (greyscale) or three (red, green, blue). Transparency is dropped.

    Args:
      paths: the files.
      channels: the number of channels that the model reads, 1 or 3. With 3, a greyscale image is copied into three
        channels. With 1, a colour image is an error. An image with a palette of grey colours is greyscale.
      size: (height, width). Without a size, all images must have the same size.
      resized: whether images are scaled to `size` without a change of the aspect ratio, and cropped at the edges. If
        not, another size is an error.

    Raises:
      UserError: if `channels` is another number, if an image cannot be read, or if an image has another size or number
        of channels.
    """
    return _read(paths, channels, size, resized)[0]


def _read(paths: Sequence[Path], channels: int, size: Sequence[int],
          resized: bool = True) -> tuple[UInt8[np.ndarray, 'images height width channels'], list[int]]:
    """Returns the images of `read_images`, and a hash of the pixels of each image before it was scaled."""
    if channels not in (1, 3):
        raise UserError(f'{paths[0]} is an image file and would be read with 1 or 3 channels, but the model reads '
                        f'{channels} channels. Use an .npz file with an array inputs [n, height, width, {channels}]')
    array, transparent, keys = np.empty((0, 0, 0, channels), np.uint8), 0, []
    for number, path in enumerate(paths):
        image = _opened(path)
        if channels == 1 and not _is_grey(image, path):
            raise UserError(f'{path} is a colour image ({image.mode}), but the training images are greyscale. Convert '
                            'the image to greyscale')
        transparent += image.mode.endswith('A') or 'transparency' in image.info  # as in palettes
        image = _decoded(image, path, 'L' if channels == 1 else 'RGB')
        keys.append(key(np.asarray(image).tobytes()))
        if size and resized:
            image = ImageOps.fit(image, (size[1], size[0]), Image.Resampling.BICUBIC)
        if not number:
            array = np.empty((len(paths), *(size or (image.height, image.width)), channels), np.uint8)
        if (image.height, image.width) != array.shape[1:3]:
            pixels = f'{array.shape[2]} x {array.shape[1]}'
            raise UserError(f'{path} has {image.width} x {image.height} pixels, but ' + (
                f'the model reads images of {pixels} pixels. Scale the image to this size' if size else
                f'{paths[0]} has {pixels}. Set config.data.image_size to scale all images to one size'))
        array[number] = np.asarray(image).reshape(array.shape[1:])
    if transparent:
        log_once(f'{transparent} of {len(paths)} images, such as in {paths[0].parent}, have an alpha channel or '
                 'transparent colours. Transparency is not used')
    return array, keys


def all_grey(folder: Path) -> bool:
    """Returns whether all images of the classes in a folder are greyscale. The images are not decoded.

    An image with a palette counts as a colour image, so that existing runs keep their number of channels. However,
    Pillow opens a GIF or BMP file whose palette is exactly the levels of grey, in order, as a greyscale image.
    """
    return all(_opened(path).mode in GREY for path, _ in _paths_and_classes(folder))


def _is_grey(image: Image.Image, path: Path) -> bool:
    """Returns whether an image is greyscale, or has a palette of grey colours."""
    if image.mode != 'P':
        return image.mode in GREY
    with _reading(path):
        palette = np.reshape(image.getpalette('RGB') or [], (-1, 3))  # decodes the image
    return bool((palette == palette[:, :1]).all())


def _opened(path: Path) -> Image.Image:
    """Opens an image without decoding it.

    Raises:
      UserError: if the file is not an image, contains several images, or has more than 8 bits per channel.
    """
    with _reading(path):
        image = Image.open(path)
        count, deep = _count(image), _is_deep(image)
    if count > 1:
        raise UserError(f'{path} contains {count} images (pages or frames), but a file must contain one image. Save '
                        'the images that you need as separate files')
    if deep:
        raise UserError(f'{path} has more than 8 bits per channel (mode {image.mode}). Convert the image to 8 '
                        'bits, or write the images to an .npz file')
    return image


def _count(image: Any) -> int:
    """Returns the number of images in a file. Smaller versions of the first image do not count."""
    if image.format == 'MPO':  # a photo, to which the camera has added previews
        return 1
    count = frames = getattr(image, 'n_frames', 1)
    if image.format == 'TIFF':
        for frame in range(1, frames):
            image.seek(frame)
            count -= image.tag_v2.get(ExifTags.Base.NewSubfileType, 0) & 1  # the bit of reduced-resolution versions
        image.seek(0)
    return count


def _is_deep(image: Any) -> bool:
    """Returns whether an image has more than 8 bits per channel. Pillow would truncate colour images to 8 bits."""
    stored = image.tile[0][3] if image.tile else ''  # how the pixels are stored
    return (image.mode.startswith(DEEP)
            or image.format == 'TIFF' and max(image.tag_v2.get(ExifTags.Base.BitsPerSample, (1,))) > 8
            or image.format == 'PNG' and ';16' in stored  # such as 'RGB;16B'
            or image.format == 'PPM' and image.mode == 'RGB' and isinstance(stored, tuple) and stored[-1] > 255)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Runs the body, which reads the image `path` with Pillow. Converts all exceptions to a UserError."""
    try:
        yield
    except Exception as error:  # Pillow raises many types of exceptions for damaged files, such as struct.error
        raise UserError(f'{path} cannot be read as an image: {error}. Repair or remove the file') from None


def _decoded(image: Image.Image, path: Path, mode: str) -> Image.Image:
    """Decodes an image, rotates it according to its EXIF data, and converts it to the given mode.

    Raises:
      UserError: if the file is damaged.
    """
    with _reading(path), image:
        return ImageOps.exif_transpose(image).convert(mode)
