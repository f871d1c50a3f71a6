package image

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
)

// WriteLayout writes an index to dir as an OCI layout. index.json lists the images directly, since the imager of Talos
// does not read nested indexes. An existing layout is replaced. It is an error if dir contains anything else.
func WriteLayout(dir string, index v1.ImageIndex) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("write OCI layout: %w", err)
	}

	// Every layout contains this file (image-spec, image-layout.md). It is written first, so an incomplete layout can be
	// replaced, too.
	if _, err := os.Stat(filepath.Join(dir, "oci-layout")); err != nil && len(entries) > 0 {
		return fmt.Errorf("write OCI layout %s: directory is not empty and not an OCI layout", dir)
	}

	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("replace OCI layout: %w", err)
	}

	if _, err := layout.Write(dir, index); err != nil {
		return fmt.Errorf("write OCI layout %s: %w", dir, err)
	}

	return nil
}
