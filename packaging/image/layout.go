package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// marker is in every OCI layout (image-spec, image-layout.md).
const marker = "oci-layout"

// WriteLayout writes an index to dir as an OCI layout: its images are listed in index.json itself, since Talos's imager reads no nested index. What
// layout was there is replaced; a folder that is none is left alone, and that is an error.
func WriteLayout(dir string, index v1.ImageIndex) error {
	if err := checkReplaceable(dir); err != nil {
		return err
	}

	parent := filepath.Dir(dir)
	if err := os.MkdirAll(parent, executable); err != nil {
		return fmt.Errorf("write OCI layout %s: %w", dir, err)
	}

	next, err := os.MkdirTemp(parent, filepath.Base(dir)+"-")
	if err != nil {
		return fmt.Errorf("write OCI layout %s: %w", dir, err)
	}
	defer os.RemoveAll(next) //nolint:errcheck // it is gone if all went well

	if err := os.Chmod(next, executable); err != nil {
		return fmt.Errorf("write OCI layout %s: %w", dir, err)
	}

	if _, err := layout.Write(next, index); err != nil {
		return fmt.Errorf("write OCI layout %s: %w", dir, err)
	}

	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("replace OCI layout %s: %w", dir, err)
	}

	if err := os.Rename(next, dir); err != nil {
		return fmt.Errorf("replace OCI layout %s: %w", dir, err)
	}

	return nil
}

func checkReplaceable(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}

	if err != nil {
		return fmt.Errorf("write OCI layout: %w", err)
	}

	if _, err := os.Stat(filepath.Join(dir, marker)); err != nil && len(entries) > 0 {
		return fmt.Errorf("write OCI layout %s: there is something else", dir)
	}

	return nil
}

// ReadLayout reads what WriteLayout has written.
func ReadLayout(dir string) (v1.ImageIndex, error) {
	if _, err := os.Stat(filepath.Join(dir, marker)); err != nil {
		return nil, fmt.Errorf("read OCI layout %s: there is none (make image): %w", dir, err)
	}

	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, fmt.Errorf("read OCI layout %s: %w", dir, err)
	}

	return index, nil
}

// Push uploads the OCI layout in dir under a name such as host/repository:tag, and returns that with the digest. Credentials are those of docker and
// podman. A registry on loopback is spoken to without TLS.
func Push(ctx context.Context, dir, reference string) (string, error) {
	ref, err := name.ParseReference(reference, name.StrictValidation)
	if err != nil {
		return "", fmt.Errorf("push to %q: want host/repository:tag: %w", reference, err)
	}

	index, err := ReadLayout(dir)
	if err != nil {
		return "", err
	}

	digest, err := index.Digest()
	if err != nil {
		return "", fmt.Errorf("read OCI layout %s: %w", dir, err)
	}

	if err := remote.WriteIndex(ref, index, remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain)); err != nil {
		return "", fmt.Errorf("push %s to %s: %w", dir, ref, err)
	}

	return ref.Context().Digest(digest.String()).String(), nil
}
