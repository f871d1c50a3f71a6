package settings

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// LastKnownGood keeps the last good configuration for the next process: Talos starts an extension service anew when its document changes, and the change may be
// for the worse (ExtensionServiceController). The zero value keeps nothing.
type LastKnownGood struct {
	// Dir is a folder that outlives the process.
	Dir string
}

func (m LastKnownGood) path() string { return filepath.Join(m.Dir, "last-good.yaml") }

// remember replaces what is kept.
func (m LastKnownGood) remember(config []byte) error {
	if m.Dir == "" {
		return nil
	}

	next := m.path() + ".next"

	err := os.WriteFile(next, config, 0o600)
	if err == nil {
		err = os.Rename(next, m.path())
	}

	if err != nil {
		return fmt.Errorf("keep the configuration: %w", err)
	}

	return nil
}

// recall returns what is kept, or an error if that is nothing.
func (m LastKnownGood) recall() ([]byte, error) {
	if m.Dir == "" {
		return nil, errors.New("there is no folder for the last good configuration")
	}

	return os.ReadFile(m.path())
}
