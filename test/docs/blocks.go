package docs

import (
	"context"
	"encoding/json"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/siderolabs/talos/pkg/machinery/config/configloader"
)

// fileName matches the comment in the first line of a block that names its file.
var fileName = regexp.MustCompile(`^# ([\w.-]+\.(?:ya?ml|json))\n`)

// blocks checks the blocks in order and runs commands that can be run. The files that blocks show exist from the start.
func (r *reading) blocks(ctx context.Context) error {
	for _, b := range r.page.blocks {
		for name, content := range shown(b) {
			if err := r.make(name, content); err != nil {
				return err
			}
		}
	}

	for _, b := range r.page.blocks {
		if slices.Contains([]string{"console", "text", "promql"}, b.language) {
			r.report.Output++
		} else {
			r.report.Snippets++
		}

		r.block(ctx, b)
	}

	return nil
}

// shown returns the files in a block: the block itself, if its first line names a file, and the configuration files of an ExtensionServiceConfig.
func shown(b block) map[string]string {
	files := map[string]string{}

	if match := fileName.FindStringSubmatch(b.text); match != nil {
		files[match[1]] = b.text
	}

	loaded, err := configloader.NewFromBytes([]byte(b.text), configloader.WithAllowPatchDelete())
	if b.language != "yaml" || err != nil {
		return files
	}

	for _, service := range loaded.ExtensionServiceConfigs() {
		for _, file := range service.ConfigFiles() {
			files[path.Base(file.MountPath())] = file.Content()
		}
	}

	return files
}

func (r *reading) block(ctx context.Context, b block) {
	switch b.language {
	case "":
		r.problem(b.line, "a block without a language: write one after the fence, text or console for output")
	case "yaml":
		r.yaml(b)
	case "json":
		if !json.Valid([]byte(b.text)) {
			r.problem(b.line, "invalid JSON")
		}
	case "sh", "shell":
		r.commands(ctx, located{b.line, b.text})
	case "console", "text":
		// Program output.
	case "promql":
		// test/monitoring checks these.
	default:
		r.problem(b.line, "unknown language %s", b.language)
	}

	if strings.TrimSpace(b.text) == "" {
		r.problem(b.line, "an empty block")
	}
}
