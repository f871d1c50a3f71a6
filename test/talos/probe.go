package talos

import (
	"fmt"
	"os"
	"path/filepath"
)

// probeSpec makes the probe an extension service under the product's name, so that a bed looks the same with either.
const probeSpec = `name: talos-ccm
container:
  entrypoint: ./talos-ccm
  mounts:
    - source: /system/run/machined/machine.sock
      destination: /system/run/machined/machine.sock
      type: bind
      options: [bind, ro]
depends:
  - path: /system/run/machined/machine.sock
restart: always
`

// probeExtension lays out the root file system of the smallest extension there is.
func probeExtension(dir, program string) error {
	if err := writeFile(filepath.Join(dir, "usr/local/etc/containers/talos-ccm.yaml"), []byte(probeSpec)); err != nil {
		return err
	}

	content, err := os.ReadFile(program)
	if err != nil {
		return fmt.Errorf("read probe: %w", err)
	}

	target := filepath.Join(dir, "usr/local/lib/containers/talos-ccm/talos-ccm")
	if err := writeFile(target, content); err != nil {
		return err
	}

	if err := os.Chmod(target, 0o755); err != nil {
		return fmt.Errorf("make probe executable: %w", err)
	}

	return nil
}
