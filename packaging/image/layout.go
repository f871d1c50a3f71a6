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

// marker is a file that every OCI layout contains (image-spec, image-layout.md).
const marker = "oci-layout"

// WriteLayout writes an index to dir as an OCI layout. index.json lists the images directly, since the imager of
// Talos does not read nested indexes. An existing layout is replaced. It is an error if dir contains anything else.
func WriteLayout(dir string, index v1.ImageIndex) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("write OCI layout: %w", err)
	}

	if _, err := os.Stat(filepath.Join(dir, marker)); err != nil && len(entries) > 0 {
		return fmt.Errorf("write OCI layout %s: directory is not empty and not an OCI layout", dir)
	}

	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("replace OCI layout: %w", err)
	}

	// It writes the marker first, so an incomplete layout can be replaced, too.
	if _, err := layout.Write(dir, index); err != nil {
		return fmt.Errorf("write OCI layout %s: %w", dir, err)
	}

	return nil
}

// ReadLayout reads an OCI layout that WriteLayout has written.
func ReadLayout(dir string) (v1.ImageIndex, error) {
	if _, err := os.Stat(filepath.Join(dir, marker)); err != nil {
		return nil, fmt.Errorf("read OCI layout %s: not found, run make image: %w", dir, err)
	}

	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, fmt.Errorf("read OCI layout %s: %w", dir, err)
	}

	return index, nil
}

// Push pushes the OCI layout in dir to a reference such as host/repository:tag, and returns the reference with the
// digest. It uses the credentials of Docker and Podman. A registry on a loopback address is accessed without TLS.
func Push(ctx context.Context, dir, reference string) (string, error) {
	ref, err := name.ParseReference(reference, name.StrictValidation)
	if err != nil {
		return "", fmt.Errorf("parse reference %q, want host/repository:tag: %w", reference, err)
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
